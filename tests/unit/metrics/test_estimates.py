"""Intervals and pass@k against values worked out otherwise."""

import itertools
import math

import numpy as np
import pytest

from metrics.estimates import mean_over_prompts, pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (102, 256, 0.3404, 0.4596)],
)
def test_wilson_interval(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-3)


@pytest.mark.parametrize(("n", "c"), [(1, 1), (5, 0), (5, 2), (6, 5), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c):
    marks = [i < c for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(marks, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="1 to"):
        pass_at_k(n, c, n + 1)


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_prompts():
    values = np.random.default_rng(1).random(400)
    estimate = mean_over_prompts(values.tolist())
    half = 1.96 * values.std() / math.sqrt(400)
    assert estimate.mean == pytest.approx(values.mean()) and estimate.n == 400
    assert (estimate.low, estimate.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.01
    )
    assert mean_over_prompts(values.tolist()) == estimate


def test_a_proportion_without_spread_is_not_certain_but_a_difference_of_nothing_is():
    assert mean_over_prompts([1.0] * 10, proportion=True).low == pytest.approx(0.7225, abs=1e-3)
    assert mean_over_prompts([0.0] * 10).high == 0.0
    assert math.isnan(mean_over_prompts([]).mean)
