"""Work that vLLM does for every sampled token and that nobody here reads: switched off.

Invariant: token ids and logprobs stay what they were. Called once by `actors.vllm_engine`, before vLLM forks
its engine process, which inherits it. Written against the pinned vLLM: a name that is gone there fails at
start-up, not in silence.
"""

from __future__ import annotations

from typing import Any

import torch


def skip_unread_work() -> None:
    """Leave out the text of each sampled token beside its logprob (in the actor's process) and the token's
    rank in the vocabulary (in the engine's: a pass over all logits, 7 % of a 135M model's step on CPU)."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample import sampler as sampler_module

    sampler: Any = sampler_module
    with_text = LogprobsProcessor.from_new_request
    _ = sampler.batched_count_greater_than  # must be there to be replaced

    def without_text(tokenizer: Any, request: Any) -> LogprobsProcessor:
        return with_text(None, request)

    LogprobsProcessor.from_new_request = without_text  # type: ignore[method-assign]
    sampler.batched_count_greater_than = _no_ranks


def _no_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logprobs.shape[0], dtype=torch.int64, device=logprobs.device)
