"""Policy loss, importance weights, KL and their statistics. Pure functions on flat tensors.

Every [N] tensor has one entry per *action token*: `learner.batch` gathers the tokens that the policy
sampled and nothing else, so loss, KL, entropy and statistics cannot see an observation. A weight per
token (`token_weights`) folds `loss_agg_mode` in, with counts of the whole optimizer batch: the loss is a
plain weighted sum, and splitting it over micro-batches or ranks changes nothing. Called by `learner.trainer`.

Three policies appear: *behaviour* sampled the token (the engine's logprob), *proximal* is the learner's
policy at the start of the step, *current* is being optimised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp of more is meaningless and would become inf


def token_weights(
    mode: str, lengths: np.ndarray, sequence_of: np.ndarray, max_sequence_tokens: int
) -> np.ndarray:
    """Weight [N] float32 of each action token so that `loss = sum(weight * token_loss)`.

    `lengths` [S]: action tokens of every sequence in the optimizer batch; `sequence_of` [N]: index into it.

    - token-mean               1 / all action tokens           DAPO, arXiv:2503.14476, eq. 8
    - seq-mean-token-mean      1 / (S * length)                GRPO, arXiv:2402.03300, eq. 3
    - seq-mean-token-sum-norm  1 / (S * max_sequence_tokens)   Dr. GRPO, arXiv:2503.20783: no length bias

    Sequences without an action token do not count in S.
    """
    sequences = max(int(np.count_nonzero(lengths)), 1)
    if mode == "token-mean":
        per_sequence = np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (sequences * np.maximum(lengths, 1))
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = np.full(len(lengths), 1.0 / (sequences * max_sequence_tokens))
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is unknown")
    return per_sequence[sequence_of].astype(np.float32)


def importance_weights(
    mode: str, proximal: Tensor, behaviour: Tensor, sequence_of: Tensor, cap: float
) -> Tensor:
    """Truncated importance weights [N] of proximal against behaviour, without gradient.

    - token     min(pi_prox / pi_behaviour, cap)                    IMPALA's rho-bar, arXiv:1802.01561
    - sequence  the same with the product over the whole sequence   TIS, fengyao.notion.site/off-policy-rl

    They correct for stale weights and for the engine's own numerics; truncation bounds the variance.
    """
    log_ratio = (proximal - behaviour).detach()
    if mode == "sequence":
        _, index = torch.unique(sequence_of, return_inverse=True)
        sums = torch.zeros(int(index.max()) + 1, dtype=log_ratio.dtype, device=log_ratio.device)
        log_ratio = sums.index_add_(0, index, log_ratio)[index]
    elif mode != "token":
        raise ValueError(f"rollout_is {mode!r} has no importance weights")
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp().clamp(max=cap)


@dataclass(frozen=True)
class PolicyLoss:
    tokens: Tensor  # [N] loss of each token, to be weighted and summed
    ratio: Tensor  # [N] detached
    clipped: Tensor  # [N] bool: tokens whose gradient the clip removed (ppo) or bounded (cispo)


def policy_loss(
    kind: str, logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Surrogate loss per token; r = exp(logprobs - old), A = advantage.

    - ppo    -min(r A, clip(r, 1 - low, 1 + high) A)   arXiv:1707.06347 eq. 7; clip-higher: DAPO
    - cispo  -sg(clip(r, 1 - low, 1 + high)) A logprob  MiniMax-M1, arXiv:2506.13585, eq. 4: every token
      keeps its gradient, only its weight is bounded
    """
    log_ratio = (logprobs - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "ppo":
        plain, limited = ratio * advantages, bounded * advantages
        return PolicyLoss(-torch.minimum(plain, limited), ratio.detach(), limited.detach() < plain.detach())
    if kind == "cispo":
        return PolicyLoss(
            -bounded.detach() * advantages * logprobs, ratio.detach(), ratio.detach() != bounded.detach()
        )
    raise ValueError(f"policy_loss {kind!r} is unknown; choose ppo or cispo")


def kl_divergence(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(current || reference) per token [N], estimated from the sampled token (joschu.net/blog/kl-approx).

    d = logprobs - reference: k1 = d (unbiased, but no gradient in expectation), k2 = d^2 / 2 (its gradient is
    that of the KL), k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1((-difference).clamp(max=_MAX_LOG_RATIO)) + difference
    raise ValueError(f"kl_estimator {estimator!r} is unknown; choose k1, k2 or k3")
