"""A short series of kills during checkpoints: `benchmarks/checkpoint_kills.py` is the long one."""

import pytest

from benchmarks.checkpoint_kills import measure
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow


def test_two_learners_killed_while_they_write_lose_nothing(tmp_path):
    assert measure(tiny_model(tmp_path / "model"), tmp_path, kills=2, seed=1)
