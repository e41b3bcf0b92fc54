"""Estimates with intervals, for evaluations. Pure numpy, no state.

The unit of resampling is the prompt: samples of one prompt are not independent of each other, prompts are.
Intervals are 95 % percentile bootstraps (Efron 1979) with a fixed seed, so that the same samples always give
the same interval. Used by `actors.samples` and the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959964
RESAMPLES = 2000
_CHUNK = 64  # resamples computed at once: bounds the memory


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int  # prompts


def mean_over_prompts(values: Sequence[float], *, proportion: bool = False) -> Estimate:
    """`values`: one a prompt. Of a `proportion` that is all 0 or all 1, where a bootstrap sees no spread,
    the interval is Wilson's."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(data.mean())
    if proportion and np.ptp(data) == 0 and mean in (0.0, 1.0):
        return Estimate(mean, *wilson_interval(int(mean * data.size), data.size), data.size)
    low, high = np.quantile(_resampled_means(data), (0.025, 0.975))
    return Estimate(mean, float(low), float(high), data.size)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of a prompt's n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Codex (arXiv:2107.03374, equation 1). Needs k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 to {n} samples a prompt")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion at 95 % (Wilson 1927, JASA 22:209)."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _resampled_means(data: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    means = [
        data[rng.integers(0, data.size, (min(_CHUNK, RESAMPLES - done), data.size))].mean(axis=1)
        for done in range(0, RESAMPLES, _CHUNK)
    ]
    return np.concatenate(means)
