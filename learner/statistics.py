"""Sums up what a step tells about its tokens, over micro-batches and ranks.

Invariant: every mean is over action tokens only, each counted once, whatever the split. Called by
`learner.trainer`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from buffer.messages import Batch
from configs.schema import LearnerConfig
from learner.objective import Objective
from metrics import names


class StepStatistics:
    """Token sums of one step. `add` locally, `reduce` once (a collective), then read `metrics`."""

    _SUMS: tuple[str, ...] = (
        "tokens",
        "loss",
        names.ENTROPY,
        names.KL_REF,
        names.CLIP_FRACTION,
        names.RATIO_MEAN,
        names.IMPORTANCE_MEAN,
        names.IMPORTANCE_ZERO,
        names.VALUE_LOSS,
        "first_tokens",
        names.MISMATCH_KL,
        names.LOGPROB_GAP_MEAN,
    )

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self._SUMS}
        self._gap_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, done: Objective, entropy_N: Tensor) -> None:
        """One micro-batch: its (already weighted) loss and what its tokens showed."""
        self._sums["tokens"] += entropy_N.numel()
        self._sums["loss"] += done.loss.detach().double()
        for name, values_N in (
            (names.ENTROPY, entropy_N),
            (names.CLIP_FRACTION, done.policy.clipped),
            (names.RATIO_MEAN, done.policy.ratio),
            (names.IMPORTANCE_MEAN, done.importance),
            (names.IMPORTANCE_ZERO, done.importance == 0),
            (names.KL_REF, done.kl),
            (names.VALUE_LOSS, done.value),
        ):
            if values_N is not None:
                self._sums[name] += values_N.detach().double().sum()

    def add_mismatch(self, logprobs_N: Tensor, behaviour_N: Tensor) -> None:
        """Engine against learner before any update of this step: k3 of KL(behaviour || learner), and gaps."""
        d = (logprobs_N.detach() - behaviour_N).double()
        self._sums["first_tokens"] += d.numel()
        self._sums[names.MISMATCH_KL] += (torch.expm1(d.clamp(max=20)) - d).sum()
        self._sums[names.LOGPROB_GAP_MEAN] += d.abs().sum()
        self._gap_max = torch.maximum(self._gap_max, d.abs().max())

    def reduce(self) -> None:
        """Sum over ranks. A collective: every rank calls it."""
        if dist.get_world_size() == 1:
            return
        sums = torch.stack(list(self._sums.values()))
        dist.all_reduce(sums)
        self._sums = dict(zip(self._SUMS, sums, strict=True))
        dist.all_reduce(self._gap_max, op=dist.ReduceOp.MAX)

    def metrics(self, updates: int) -> dict[str, float]:
        sums = {name: float(value) for name, value in self._sums.items()}
        tokens, first = max(sums.pop("tokens"), 1.0), max(sums.pop("first_tokens"), 1.0)
        loss = sums.pop("loss")
        gaps = (names.MISMATCH_KL, names.LOGPROB_GAP_MEAN)
        means = {name: value / (first if name in gaps else tokens) for name, value in sums.items()}
        return {names.LOSS: loss / max(updates, 1), names.LOGPROB_GAP_MAX: float(self._gap_max), **means}


def disagreement(metrics: dict[str, float], config: LearnerConfig) -> str | None:
    """The warning that engine and learner disagree about the same tokens, if the step's metrics say so."""
    gap = metrics[names.LOGPROB_GAP_MEAN]
    if config.policy_loss == "sft" or gap <= config.logprob_gap_warn:
        return None
    return (
        f"step {metrics[names.STEP]:.0f}: ENGINE AND LEARNER DISAGREE: the mean gap of their logprobs is "
        f"{gap:.3f} (learner.logprob_gap_warn = {config.logprob_gap_warn:g}, largest gap "
        f"{metrics[names.LOGPROB_GAP_MAX]:.2f}) on tokens {metrics[names.STALENESS_MEAN]:.1f} versions old "
        "on average. Near 0 versions this is no drift: compare model.dtype, the chat template, "
        "actors.temperature, and what actors.engine passes to vLLM (quantisation, top-k, penalties)"
    )


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What the batch alone tells: rewards, and how old its tokens are, in versions."""
    members = [t for group in batch.groups for t in group if t.reward is not None]
    rewards = np.array([t.reward for t in members], dtype=np.float64)
    versions = [t.versions[t.action_mask.astype(bool)] for t in members]
    ages = batch.version - np.concatenate(versions) if versions else np.zeros(0)
    return {
        names.REWARD_MEAN: float(rewards.mean()) if len(rewards) else 0.0,
        names.REWARD_STD: float(rewards.std()) if len(rewards) else 0.0,
        names.STALENESS_MEAN: float(ages.mean()) if len(ages) else 0.0,
        names.STALENESS_MAX: float(ages.max()) if len(ages) else 0.0,
    }
