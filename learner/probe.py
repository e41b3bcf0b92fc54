"""A fixed sequence and what the policy says of it: engines are compared with this (`weightsync.receiver`).

Invariant: the same sequence for the same model, whatever was trained. Called by `learner.trainer`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from learner.batch import Block, MicroBatch
from learner.logprobs import LogprobHead
from learner.policy import Policy, Row

Probe = tuple[Sequence[int], Sequence[float]]  # token ids; logprobs of all but the first, at temperature 1

TOKENS = 64


@torch.no_grad()
def ask(engine: Callable[[Row], Any], policy: Policy, device: torch.device, tokens: int) -> Probe:
    """`engine` runs `policy`; at most `tokens` tokens. A collective under ZeRO-3."""
    vocabulary = policy.hf.config.get_text_config().vocab_size
    ordinary = range(vocabulary // 10, vocabulary // 2)  # special tokens, such as an image's, are at the ends
    ids = random.Random(0).sample(ordinary, min(tokens, TOKENS, len(ordinary)))
    head = policy.hf.get_output_embeddings()
    assert isinstance(head, LogprobHead)
    temperature, head.temperature = head.temperature, 1.0  # prompt logprobs of an engine know none
    try:
        logprobs, _, _ = engine(policy.row(_micro_batch(ids), device))
    finally:
        head.temperature = temperature
    return ids, logprobs.tolist()


def _micro_batch(ids: Sequence[int]) -> MicroBatch:
    """One sequence, all of whose tokens are predicted."""
    targets = np.array(ids[1:], dtype=np.int64)
    places = np.arange(len(targets))
    unused = np.zeros(len(targets), dtype=np.float32)
    return MicroBatch(
        token_ids=np.array([ids], dtype=np.int64),
        position_ids=np.arange(len(ids))[None],
        root=0,
        blocks=(Block(0, len(ids)),),
        predict_from=places,
        targets=targets,
        behaviour=unused,
        advantages=unused,
        weights=unused,
        sequence_of=np.zeros(len(targets), dtype=np.int64),
        token_index=places,
    )
