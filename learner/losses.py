"""Policy loss, importance weights, KL, value loss and aggregation. Pure functions on flat tensors.

Every [N] tensor has one entry per *action token*: `learner.batch` gathers the tokens that the policy
sampled and nothing else, so loss, KL, entropy and statistics cannot see an observation. A weight per
token (`token_weights`) folds `loss_agg_mode` in, with counts of the whole optimizer batch: the loss is a
plain weighted sum, and splitting it over micro-batches or ranks changes nothing. Called by `learner.trainer`.

Three policies appear: *behaviour* sampled the token (the engine's logprob), *proximal* is the learner's
policy at the start of the step, *current* is being optimised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import LearnerConfig

_MAX_LOG_RATIO = 20.0  # exp of more is meaningless and would become inf


# --- aggregation ----------------------------------------------------------------------------------


def token_weights(
    mode: str,
    lengths: np.ndarray,
    sequence_of: np.ndarray,
    max_sequence_tokens: int,
    group_of: np.ndarray,
) -> np.ndarray:
    """Weight [N] float32 of each action token so that `loss = sum(weight * token_loss)`.

    `lengths` [S]: action tokens of every sequence in the optimizer batch, 0 for one that is not in it;
    `group_of` [S]: its prompt; `sequence_of` [N]: index into both. S' and P are the sequences and prompts
    with an action token.

    - token-mean               1 / all action tokens            DAPO, arXiv:2503.14476, eq. 8
    - seq-mean-token-mean      1 / (S' * length)                GRPO, arXiv:2402.03300, eq. 3
    - seq-mean-token-sum       1 / S'                           REINFORCE: the log-probability of the whole
    - seq-mean-token-sum-norm  1 / (S' * max_sequence_tokens)   Dr. GRPO, arXiv:2503.20783: no length bias
    - prompt-mean              1 / (P * the group's tokens)     ScaleRL, arXiv:2510.13786
    """
    sequences = max(int(np.count_nonzero(lengths)), 1)
    if mode == "token-mean":
        per_sequence = np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (sequences * np.maximum(lengths, 1))
    elif mode == "seq-mean-token-sum":
        per_sequence = np.full(len(lengths), 1.0 / sequences)
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = np.full(len(lengths), 1.0 / (sequences * max_sequence_tokens))
    elif mode == "prompt-mean":
        of_group = np.bincount(group_of, weights=lengths)
        per_sequence = 1.0 / (max(np.count_nonzero(of_group), 1) * np.maximum(of_group[group_of], 1))
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is unknown")
    return per_sequence[sequence_of].astype(np.float32)


# --- off-policy correction ------------------------------------------------------------------------


def importance_weights(
    mode: str, proximal: Tensor, behaviour: Tensor, sequence_of: Tensor, floor: float, cap: float
) -> Tensor:
    """Importance weights [N] of proximal against behaviour, without gradient; w = pi_prox / pi_behaviour.

    - token          min(w, cap)                            IMPALA's rho-bar, arXiv:1802.01561
    - sequence       min(product of w over it, cap)         TIS, fengyao.notion.site/off-policy-rl
    - token-mask     w if floor <= w <= cap, else 0         IcePop, arXiv:2510.18855
    - sequence-mask  the same decided by the sequence's geometric mean of w, which is also the weight

    They correct for stale weights and for the engine's own numerics; the bounds limit the variance.
    """
    log_ratio = (proximal - behaviour).detach()
    if mode == "sequence":
        log_ratio = _over_sequences(log_ratio, sequence_of, mean=False)
    elif mode == "sequence-mask":
        log_ratio = _over_sequences(log_ratio, sequence_of, mean=True)
    elif mode not in ("token", "token-mask"):
        raise ValueError(f"rollout_is {mode!r} has no importance weights")
    weights = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    if mode.endswith("-mask"):
        return torch.where((weights < floor) | (weights > cap), 0.0, weights)
    return weights.clamp(max=cap)


def _over_sequences(values: Tensor, sequence_of: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean [N] of each token's sequence."""
    _, index, counts = torch.unique(sequence_of, return_inverse=True, return_counts=True)
    totals = torch.zeros(len(counts), dtype=values.dtype, device=values.device)
    totals = totals.index_add_(0, index, values)
    return (totals / counts if mean else totals)[index]


# --- policy losses --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """What a policy loss sees: r = exp(logprobs - old), A = advantages."""

    logprobs: Tensor  # [N] current, with gradient
    old: Tensor  # [N]
    advantages: Tensor  # [N]
    sequence_of: Tensor  # [N]

    @property
    def log_ratio(self) -> Tensor:
        return (self.logprobs - self.old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


@dataclass(frozen=True)
class PolicyLoss:
    tokens: Tensor  # [N] loss of each token, to be weighted and summed
    ratio: Tensor  # [N] detached
    clipped: Tensor  # [N] bool: tokens whose gradient is removed (ppo, gspo, dppo) or bounded (cispo)


def _ppo(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A): arXiv:1707.06347 eq. 7; unequal bounds: DAPO.

    Dual clip (arXiv:1912.09729), `clip_ratio_c` > 0: where A < 0 the loss is at most -c A.
    """
    return _clipped_surrogate(x.log_ratio.exp(), x.advantages, config)


def _gspo(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """ppo with the sequence's ratio s = exp(mean of log r) in place of r: arXiv:2507.18071.

    As GSPO-token: the value of s, and for each token the gradient of its own logprob.
    """
    log_s = _over_sequences((x.logprobs - x.old).detach(), x.sequence_of, mean=True)
    ratio = log_s.clamp(max=_MAX_LOG_RATIO).exp() * (x.logprobs - x.logprobs.detach()).exp()
    return _clipped_surrogate(ratio, x.advantages, config)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: LearnerConfig) -> PolicyLoss:
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    objective, limited = ratio * advantages, bounded * advantages
    clipped = limited.detach() < objective.detach()
    objective = torch.minimum(objective, limited)
    if config.clip_ratio_c > 0:
        lowest = config.clip_ratio_c * advantages
        dual = (advantages < 0) & (objective.detach() < lowest)
        objective, clipped = torch.where(dual, lowest, objective), clipped | dual
    return PolicyLoss(-objective, ratio.detach(), clipped)


def _cispo(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A logprob: MiniMax-M1, arXiv:2506.13585, eq. 4.

    Every token keeps its gradient, only its weight is bounded.
    """
    ratio = x.log_ratio.detach().exp()
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return PolicyLoss(-bounded * x.advantages * x.logprobs, ratio, ratio != bounded)


def _sapo(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: arXiv:2511.20347.

    A soft gate: its gradient is that of r A at r = 1 and fades on both sides. Nothing is clipped.
    """
    ratio = x.log_ratio.exp()
    tau = torch.where(x.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return PolicyLoss(-gate * x.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def _dppo(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """-M r A: arXiv:2602.04879, binary total variation. M = 0 where the token's *probability* (not its ratio)
    has moved further than clip_ratio_high (A > 0, up) or clip_ratio_low (A < 0, down), else 1."""
    ratio = x.log_ratio.exp()
    moved = (x.logprobs.exp() - x.old.exp()).detach()
    up = (x.advantages > 0) & (moved > config.clip_ratio_high)
    away = up | ((x.advantages < 0) & (-moved > config.clip_ratio_low))
    return PolicyLoss(torch.where(away, 0.0, -ratio * x.advantages), ratio.detach(), away)


def _sft(x: Tokens, config: LearnerConfig) -> PolicyLoss:
    """-logprob: maximum likelihood of demonstrations. There is no behaviour policy and no advantage."""
    ones = torch.ones_like(x.old)
    return PolicyLoss(-x.logprobs, ones, torch.zeros_like(ones, dtype=torch.bool))


POLICY_LOSSES: dict[str, Callable[[Tokens, LearnerConfig], PolicyLoss]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo": _dppo,
    "sft": _sft,
}


def policy_loss(tokens: Tokens, config: LearnerConfig) -> PolicyLoss:
    """The surrogate loss of each token by `learner.policy_loss`."""
    return POLICY_LOSSES[config.policy_loss](tokens, config)


# --- KL and value ---------------------------------------------------------------------------------


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


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error [N] of the critic; with `clip` > 0 the worse of it and of the error of values
    kept within `clip` of `before`, those at the step's start (PPO's value clipping)."""
    plain = F.mse_loss(values, returns, reduction="none")
    if clip > 0:
        near = before + (values - before).clamp(-clip, clip)
        plain = torch.maximum(plain, F.mse_loss(near, returns, reduction="none"))
    return plain / 2
