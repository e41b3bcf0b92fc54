"""A short chaos: `benchmarks/chaos.py` is the long one."""

import pytest

from benchmarks.chaos import measure

pytestmark = pytest.mark.slow


def test_six_kills_at_random_moments_lose_and_repeat_nothing(tmp_path):
    result = measure(tmp_path, kills=6, steps=24, seed=1, learner="vector", deadline_s=900)
    assert result.kills.total() == 6
    assert result.steps == 24 and result.balanced, result.ledger
    assert result.duplicates == 0 and result.lost == 0
    assert result.weights_equal
