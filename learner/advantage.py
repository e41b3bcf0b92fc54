"""Rewards become one advantage per action token. Pure numpy, no state. Called by `learner.batch`.

Invariants: only scored trajectories count (one without a reward is not here at all); every advantage is
finite; a group without contrast gets exactly 0 from the estimators that compare within it.

A *sample* is one scored trajectory: its N action tokens, what it earned, and what the model said of it.
R = rewards of a group's n members. Group-relative estimators, the same value for all tokens:

- grpo     (R - mean) / (std + eps)       DeepSeekMath, arXiv:2402.03300, eq. 3 (std: population)
- dr_grpo  R - mean                       Understanding R1-Zero, arXiv:2503.20783, section 3
- rloo     R_i - mean of the other n - 1  Back to Basics, arXiv:2402.14740, eq. 8
- maxrl    (R - mean) / mean              Maximum Likelihood RL, arXiv:2602.02710; needs R >= 0

Estimators over the whole batch, whitened over its tokens (mean 0, std 1):

- reinforce_plus_plus           sum of what the token and those after it earn  arXiv:2501.03262
- reinforce_plus_plus_baseline  R - mean of the group                          same paper
- gae                           sum of (gamma lambda)^l delta, from a critic   arXiv:1506.02438, eq. 16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import LearnerConfig

_EPS = 1e-6  # keeps a tiny spread from becoming a huge advantage


@dataclass(frozen=True)
class Sample:
    """What an advantage may depend on, of one scored trajectory with N action tokens."""

    group: int
    reward: float  # of the whole trajectory, what its turns earned included
    turn_of: np.ndarray  # int [N], rising: the turn of each token
    turn_rewards: np.ndarray  # float [turns]; empty where no reward function looks at turns
    penalty: np.ndarray  # float [N]: kl_coef * KL of each token, with `use_kl_in_reward`; else 0
    values: np.ndarray  # float [N]: the critic's, before each token; else 0
    in_loss: bool = True  # False where `mask_truncated` leaves it out: whitening is over the others' tokens

    @property
    def score(self) -> float:
        return self.reward - float(self.penalty.sum())

    def earned(self) -> np.ndarray:
        """What each token earns [N]; adds up to `score`. The outcome comes with the last token."""
        earned = -self.penalty.astype(np.float64)
        if len(earned):
            for turn, reward in enumerate(self.turn_rewards):
                last = np.searchsorted(self.turn_of, turn, side="right") - 1
                earned[max(last, 0)] += reward  # a turn whose tokens expired: those before it, or the first
            earned[-1] += self.reward - self.turn_rewards.sum()
        return earned


@dataclass(frozen=True)
class Advantages:
    """Per sample, float32 [N]. `returns` are the critic's targets, None without a critic."""

    tokens: list[np.ndarray]
    returns: list[np.ndarray] | None = None


def advantages(samples: Sequence[Sample], config: LearnerConfig) -> Advantages:
    """Advantages of all samples of a batch, by `learner.adv_estimator` and what modifies it."""
    name = config.adv_estimator
    if name == "gae":
        return _gae(samples, config)
    if name == "reinforce_plus_plus":
        tokens = [_to_go(sample.earned(), 1.0) for sample in samples]
    elif name in GROUP_RELATIVE:
        tokens = _relative_to_group(samples, config)
    else:
        raise ValueError(f"adv_estimator {name!r} is unknown")
    if name.startswith("reinforce_plus_plus"):
        tokens = _whitened(tokens, samples)
    elif config.adv_norm == "batch":
        tokens = _scaled_by_batch(tokens)
    return Advantages([a.astype(np.float32) for a in tokens])


# --- relative to the group ------------------------------------------------------------------------


def _rloo(rewards: np.ndarray) -> np.ndarray:
    # R_i - (sum - R_i) / (n - 1) is the centred reward times n / (n - 1).
    return _centred(rewards) * (len(rewards) / (len(rewards) - 1))


def _maxrl(rewards: np.ndarray) -> np.ndarray:
    if rewards.min() < 0:
        raise ValueError(
            f"adv_estimator 'maxrl' reads rewards as probabilities of success, and one is {rewards.min():g}; "
            "shift the rewards to 0 and more, or choose grpo"
        )
    return _centred(rewards) / rewards.mean()


def _centred(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


GROUP_RELATIVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": lambda rewards: _centred(rewards) / (rewards.std() + _EPS),
    "dr_grpo": _centred,
    "rloo": _rloo,
    "maxrl": _maxrl,
    "reinforce_plus_plus_baseline": _centred,
}


def group_advantages(rewards: np.ndarray, estimator: str) -> np.ndarray:
    """Advantages [n] of one group's rewards [n]; 0 where there is nothing to compare."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if has_no_contrast(rewards):
        return np.zeros(len(rewards))
    return GROUP_RELATIVE[estimator](rewards)


def has_no_contrast(rewards: np.ndarray) -> bool:
    """A group of one, or one whose rewards are all equal: nothing to learn from (zero variance)."""
    return len(rewards) < 2 or bool(np.ptp(rewards) == 0)


def _relative_to_group(samples: Sequence[Sample], config: LearnerConfig) -> list[np.ndarray]:
    tokens = [np.zeros(len(sample.turn_of)) for sample in samples]
    for group in {sample.group for sample in samples}:
        members = [i for i, sample in enumerate(samples) if sample.group == group]
        if config.turn_credit == "group":
            _compare_turns([samples[i] for i in members], [tokens[i] for i in members], config)
            continue
        scores = np.array([samples[i].score for i in members])
        for i, advantage in zip(members, group_advantages(scores, config.adv_estimator), strict=True):
            tokens[i][:] = advantage
            if config.turn_credit == "discounted" and len(tokens[i]):
                turns_after = samples[i].turn_of[-1] - samples[i].turn_of
                tokens[i] *= config.turn_discount**turns_after
    return tokens


def _compare_turns(members: list[Sample], tokens: list[np.ndarray], config: LearnerConfig) -> None:
    """Fill `tokens`: turn k of a member against turn k of the members that have one.

    What is compared is the discounted return of the turn, G_k = r_k + turn_discount * G_(k+1), r_k being
    what its tokens earn. A turn that only one member reached has nothing to be compared with: 0.
    """
    returns = [_to_go(_by_turn(member), config.turn_discount) for member in members]
    for turn in range(max(map(len, returns), default=0)):
        reached = [i for i, of_member in enumerate(returns) if turn < len(of_member)]
        rewards = np.array([returns[i][turn] for i in reached])
        for i, advantage in zip(reached, group_advantages(rewards, config.adv_estimator), strict=True):
            tokens[i][members[i].turn_of == turn] = advantage


def _by_turn(sample: Sample) -> np.ndarray:
    """r_k of each turn, also of one whose tokens expired: what it earned stays its own."""
    told = len(sample.turn_rewards)
    turns = max(told, int(sample.turn_of[-1]) + 1 if len(sample.turn_of) else 0)
    earned = np.zeros(turns)
    earned[:told] = sample.turn_rewards
    np.subtract.at(earned, sample.turn_of, sample.penalty)
    earned[-1:] += sample.reward - sample.turn_rewards.sum()
    return earned


# --- over the batch -------------------------------------------------------------------------------


def _gae(samples: Sequence[Sample], config: LearnerConfig) -> Advantages:
    tokens, returns = [], []
    for sample in samples:
        next_values = np.append(sample.values[1:], 0.0)  # nothing is earned after the last token
        deltas = sample.earned() + config.gae_gamma * next_values - sample.values
        tokens.append(_to_go(deltas, config.gae_gamma * config.gae_lambda))
        returns.append((tokens[-1] + sample.values).astype(np.float32))
    return Advantages([a.astype(np.float32) for a in _whitened(tokens, samples)], returns)


def _to_go(values: np.ndarray, discount: float) -> np.ndarray:
    """v_t + discount * v_(t+1) + discount^2 * v_(t+2) + ..."""
    out = np.zeros(len(values))
    total = 0.0
    for i in range(len(values) - 1, -1, -1):
        total = values[i] + discount * total
        out[i] = total
    return out


def _whitened(tokens: list[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    trained = [a for a, sample in zip(tokens, samples, strict=True) if sample.in_loss]
    flat = np.concatenate(trained) if trained else np.zeros(0)
    if not len(flat) or np.ptp(flat) == 0:
        return [np.zeros_like(a) for a in tokens]
    return [(a - flat.mean()) / (flat.std() + _EPS) for a in tokens]


def _scaled_by_batch(tokens: list[np.ndarray]) -> list[np.ndarray]:
    """Divided by the standard deviation over the batch's trajectories (ScaleRL, arXiv:2510.13786)."""
    means = np.array([a.mean() for a in tokens if len(a)])
    spread = means.std() if len(means) else 0.0
    return [a / (spread + _EPS) for a in tokens] if spread else tokens


def overlong_penalty(length: int, longest: int, config: LearnerConfig) -> float:
    """What a reward loses for `length` sampled tokens of at most `longest`.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to longest - buffer, then linear, down to
    -overlong_penalty at `longest`.
    """
    if not config.overlong_buffer_tokens:
        return 0.0
    into = length - (longest - config.overlong_buffer_tokens)
    return -config.overlong_penalty * min(max(into / config.overlong_buffer_tokens, 0.0), 1.0)
