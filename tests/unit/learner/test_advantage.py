import numpy as np
import pytest

from buffer.messages import Batch
from learner.advantage import group_advantages
from learner.batch import plan
from tests.unit.learner.support import settings, trajectory


def test_grpo_is_the_standard_score_of_the_group():
    # mean 2, population variance (1 + 1 + 0) / 3
    got = group_advantages(np.array([1.0, 3.0, 2.0]), "grpo")
    np.testing.assert_allclose(got, [-(1.5**0.5), 1.5**0.5, 0.0], atol=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0, 0.0, 3.0]), "dr_grpo"), [0, -1, -1, 2])


def test_rloo_compares_with_the_mean_of_the_others():
    np.testing.assert_allclose(
        group_advantages(np.array([1.0, 0.0, 5.0]), "rloo"), [1 - 2.5, 0 - 3.0, 5 - 0.5], rtol=1e-6
    )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[1.0], [0.3, 0.3, 0.3], [0.1 + 0.2, 0.1 + 0.2]])
def test_r2_a_group_of_one_or_without_contrast_gets_zero(estimator, rewards):
    assert group_advantages(np.array(rewards), estimator).tolist() == [0.0] * len(rewards)


def test_r2_groups_without_contrast_are_counted():
    flat = tuple(trajectory(0, i, [5, 6], [7, 8], [1, 1], reward=1.0) for i in range(3))
    assert plan(Batch(1, 0, (flat,)), settings()).groups_without_contrast == 1


def test_r1_only_scored_members_count():
    rewards = [1.0, None, 0.0, None, 1.0, 0.0, None, 1.0]
    group = tuple(trajectory(0, i, [5, 6], [7 + i], [1], reward=r) for i, r in enumerate(rewards))
    (update,) = plan(Batch(1, 0, (group,)), settings(adv_estimator="dr_grpo")).updates
    (micro,) = update.ranks[0]
    np.testing.assert_allclose(micro.advantages, [0.4, -0.6, 0.4, -0.6, 0.4], rtol=1e-6)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="unknown"):
        group_advantages(np.array([0.0, 1.0]), "gae")
