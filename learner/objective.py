"""The loss of one micro-batch: policy surrogate, off-policy correction, KL, entropy and critic together.

Pure: tensors in, tensors out; each term is a formula of `learner.losses`. Called by `learner.trainer`.
Shapes: N targets of the micro-batch, A action tokens of the whole batch in its flat order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.losses import PolicyLoss, Tokens, importance_weights, kl_divergence, policy_loss, value_loss
from learner.policy import Row


@dataclass(frozen=True)
class Before:
    """What was known of the batch's action tokens before the step's first update, float32 [A].

    A rank fills in its own tokens only; None where nothing needs it.
    """

    proximal: Tensor | None = None  # logprobs under the weights at the step's start
    reference: Tensor | None = None  # logprobs under the initial model
    values: Tensor | None = None  # the critic's
    returns: Tensor | None = None  # the critic's targets


@dataclass(frozen=True)
class Objective:
    """`loss` is the micro-batch's part of the update's; the rest is for the statistics."""

    loss: Tensor  # scalar
    policy: PolicyLoss
    start: Tensor  # [N] proximal logprobs
    importance: Tensor  # [N]
    kl: Tensor | None = None  # [N] to the initial model
    value: Tensor | None = None  # [N] the critic's loss


def objective(
    row: Row, outputs: tuple[Tensor, Tensor, Tensor], before: Before, config: LearnerConfig
) -> Objective:
    """`outputs` are the policy's logprobs, entropies and values [N] for `row`."""
    logprobs, entropy, values = outputs
    index = row.token_index
    start = logprobs.detach() if before.proximal is None else before.proximal[index]
    corrects = config.rollout_is != "none" and config.policy_loss != "sft"
    tokens = Tokens(logprobs, start if corrects else row.behaviour, row.advantages, row.sequence_of)
    surrogate = policy_loss(tokens, config)
    importance = torch.ones_like(start)
    if corrects:
        importance = importance_weights(
            config.rollout_is,
            start,
            row.behaviour,
            row.sequence_of,
            config.rollout_is_floor,
            config.rollout_is_cap,
        )
    per_token = surrogate.tokens * importance
    kl = value = None
    if before.reference is not None:
        kl = kl_divergence(config.kl_estimator, logprobs, before.reference[index])
        if not config.use_kl_in_reward:
            per_token = per_token + config.kl_coef * kl
    if before.returns is not None and before.values is not None:
        value = value_loss(values, before.values[index], before.returns[index], config.value_clip)
        per_token = per_token + config.value_coef * value
    if config.entropy_coef > 0:
        per_token = per_token - config.entropy_coef * entropy
    return Objective((row.weights * per_token).sum(), surrogate, start, importance, kl, value)
