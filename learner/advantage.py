"""Rewards of a group become one advantage per trajectory. Pure numpy, no state.

Invariant: only scored members count (a member without a reward is not in the group that the learner
sees), every advantage is finite, and a group without contrast gets exactly 0. Called by `learner.batch`.

All estimators are relative to the group's other answers to the same prompt, R = rewards [n]:

- grpo     (R - mean) / (std + eps)       DeepSeekMath, arXiv:2402.03300, eq. 3 (std: population)
- dr_grpo  R - mean                       Understanding R1-Zero, arXiv:2503.20783, section 3
- rloo     R_i - mean of the other n - 1  Back to Basics, arXiv:2402.14740, eq. 8
"""

from __future__ import annotations

import numpy as np

_EPS = 1e-6  # keeps a tiny spread from becoming a huge advantage


def group_advantages(rewards: np.ndarray, estimator: str) -> np.ndarray:
    """Advantages [n] float32 of one group's rewards [n]. `estimator` is a `learner.adv_estimator`."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if has_no_contrast(rewards):
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    if estimator == "grpo":
        centred = centred / (rewards.std() + _EPS)
    elif estimator == "rloo":
        # R_i - (sum - R_i) / (n - 1) is the centred reward times n / (n - 1).
        centred = centred * (len(rewards) / (len(rewards) - 1))
    elif estimator != "dr_grpo":
        raise ValueError(f"adv_estimator {estimator!r} is unknown; choose grpo, dr_grpo or rloo")
    return centred.astype(np.float32)


def has_no_contrast(rewards: np.ndarray) -> bool:
    """A group of one, or one whose rewards are all equal: nothing to learn from (zero variance)."""
    return len(rewards) < 2 or bool(np.ptp(rewards) == 0)
