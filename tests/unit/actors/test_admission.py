"""How many groups may be in flight."""

import pytest

from actors.admission import Admission


@pytest.mark.parametrize(("members", "free"), [(0, 4), (8, 3), (9, 2), (24, 1), (25, 0), (32, 0), (40, 0)])
def test_without_a_known_cache_the_configured_number_of_trajectories_decides(members, free):
    """Ended members make room for the next group before their whole group has ended."""
    assert Admission(4, 8, 1000, None).free_groups(members) == free


def test_the_worst_is_expected_until_trajectories_have_ended():
    admission = Admission(16, 8, 1000, kv_cache_tokens=20_000)
    assert admission.free_groups(0) == 2  # 18,000 usable tokens, 8,000 a group
    admission.observe(prompt_tokens=400, tokens=500)
    assert admission.free_groups(0) == 15  # 1,200 a group: the prompt is shared


def test_longer_trajectories_admit_fewer():
    admission = Admission(16, 8, 1000, kv_cache_tokens=20_000)
    admission.observe(400, 500)
    for _ in range(500):
        admission.observe(400, 900)
    assert admission.free_groups(0) == 4
    assert admission.free_groups(4 * 8) == 0


def test_a_cache_smaller_than_one_group_still_lets_one_run():
    assert Admission(4, 8, 1000, kv_cache_tokens=500).free_groups(0) == 1
    assert Admission(4, 8, 1000, kv_cache_tokens=500).free_groups(1) == 0
