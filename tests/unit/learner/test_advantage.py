import numpy as np
import pytest

from buffer.batches import mask_expired
from buffer.messages import Batch
from learner.advantage import GROUP_RELATIVE, Sample, advantages, group_advantages, overlong_penalty
from learner.batch import plan
from learner.members import turn_of
from tests.unit.learner.support import learner_config, settings, trajectory, turns


def sample(reward, tokens=2, group=0, turn_of=None, turn_rewards=(), penalty=None, values=None):
    return Sample(
        group=group,
        reward=reward,
        turn_of=np.zeros(tokens, dtype=np.int64) if turn_of is None else np.array(turn_of, dtype=np.int64),
        turn_rewards=np.array(turn_rewards, dtype=np.float64),
        penalty=np.zeros(tokens) if penalty is None else np.array(penalty),
        values=np.zeros(tokens) if values is None else np.array(values),
    )


def of(samples, **learner):
    return [a.tolist() for a in advantages(samples, learner_config(**learner)).tokens]


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "rewards", "wanted"),
    [
        ("grpo", [1, 3, 2], [-(1.5**0.5), 1.5**0.5, 0.0]),  # mean 2, population variance 2 / 3
        ("dr_grpo", [1, 0, 0, 3], [0, -1, -1, 2]),
        ("rloo", [1, 0, 5], [1 - 2.5, 0 - 3.0, 5 - 0.5]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),  # a success in four weighs 4 times its share
        ("maxrl", [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ("reinforce_plus_plus_baseline", [1, 0], [0.5, -0.5]),
    ],
)
def test_a_group_of_rewards_by_hand(estimator, rewards, wanted):
    np.testing.assert_allclose(group_advantages(np.array(rewards), estimator), wanted, atol=1e-5)


def test_every_token_of_a_trajectory_has_its_advantage_and_groups_do_not_mix():
    samples = [sample(1, 2), sample(0, 3), sample(7, 1, group=1), sample(5, 1, group=1)]
    assert of(samples, adv_estimator="dr_grpo") == [[0.5, 0.5], [-0.5, -0.5, -0.5], [1.0], [-1.0]]


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="probabilities of success, and one is -1"):
        group_advantages(np.array([1.0, -1.0]), "maxrl")


def test_reinforce_plus_plus_whitens_returns_over_all_tokens():
    got = of([sample(1, 1), sample(0, 3)], adv_estimator="reinforce_plus_plus")
    # tokens 1, 0, 0, 0: mean 1/4, variance 3/16
    np.testing.assert_allclose(np.concatenate(got), [3**0.5] + [-(1 / 3**0.5)] * 3, rtol=1e-5)


def test_the_reinforce_plus_plus_baseline_whitens_centred_rewards_over_tokens():
    got = of([sample(1, 1), sample(0, 3)], adv_estimator="reinforce_plus_plus_baseline")
    # tokens .5, -.5, -.5, -.5: mean -1/4, variance 3/16
    np.testing.assert_allclose(np.concatenate(got), [3**0.5] + [-(1 / 3**0.5)] * 3, rtol=1e-5)


def test_gae_by_hand():
    config = learner_config(adv_estimator="gae", gae_gamma=0.5, gae_lambda=0.5)
    result = advantages([sample(1.0, 2, values=[0.2, 0.6]), sample(0.0, 1, values=[0.1])], config)
    delta_0, delta_1, other = 0.5 * 0.6 - 0.2, 1.0 - 0.6, 0.0 - 0.1
    raw = np.array([delta_0 + 0.25 * delta_1, delta_1, other])
    assert result.returns is not None
    np.testing.assert_allclose(np.concatenate(result.returns), np.add(raw, [0.2, 0.6, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(result.tokens), (raw - raw.mean()) / raw.std(), rtol=1e-4)


def test_batch_normalisation_divides_by_the_spread_over_trajectories():
    samples = [sample(1, 1), sample(0, 9), sample(4, 1, group=1), sample(0, 1, group=1)]
    got = of(samples, adv_estimator="dr_grpo", adv_norm="batch")
    spread = np.std([0.5, -0.5, 2.0, -2.0])  # each trajectory once, however long
    np.testing.assert_allclose([a[0] for a in got], np.array([0.5, -0.5, 2, -2]) / spread, rtol=1e-5)


def test_kl_in_the_reward_lowers_the_score_and_later_tokens_carry_their_own():
    samples = [sample(1, 2, penalty=[0.1, 0.3]), sample(1, 2, penalty=[0.0, 0.0])]
    np.testing.assert_allclose(of(samples, adv_estimator="dr_grpo"), [[-0.2] * 2, [0.2] * 2], atol=1e-6)
    np.testing.assert_allclose(samples[0].earned(), [-0.1, 0.7])


# --- against the papers' formulas, written anew ---------------------------------------------------


def gae_by_definition(rewards, values, gamma, lam):
    """High-dimensional continuous control, eq. 16: the sum over l of (gamma lambda)^l delta_(t+l)."""
    n = len(rewards)
    v = [*values, 0.0]
    delta = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


def test_gae_is_its_definition():
    rng = np.random.default_rng(0)
    values, penalty = rng.normal(size=6), rng.random(6)
    one = sample(0.7, 6, values=values, penalty=penalty)
    config = learner_config(adv_estimator="gae", gae_gamma=0.9, gae_lambda=0.8)
    returns = advantages([one], config).returns
    assert returns is not None
    earned = [-p for p in penalty]
    earned[-1] += 0.7
    wanted = np.array(gae_by_definition(earned, values, 0.9, 0.8))
    np.testing.assert_allclose(returns[0] - values, wanted, rtol=1e-5)


REFERENCES = {
    "grpo": lambda r, i: (
        (r[i] - sum(r) / len(r)) / (sum((x - sum(r) / len(r)) ** 2 for x in r) / len(r)) ** 0.5
    ),
    "dr_grpo": lambda r, i: r[i] - sum(r) / len(r),
    "rloo": lambda r, i: r[i] - sum(r[:i] + r[i + 1 :]) / (len(r) - 1),
    # MaxRL: the mean score function of the successes, less that of all: n/K per success, less 1 each.
    "maxrl": lambda r, i: r[i] * len(r) / sum(r) - 1,
    "reinforce_plus_plus_baseline": lambda r, i: r[i] - sum(r) / len(r),
}


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
def test_group_estimators_are_their_papers_formulas(estimator):
    for seed in range(5):
        rewards = np.random.default_rng(seed).random(7).tolist()
        wanted = [REFERENCES[estimator](rewards, i) for i in range(7)]
        np.testing.assert_allclose(group_advantages(np.array(rewards), estimator), wanted, rtol=1e-4)


# --- turns ----------------------------------------------------------------------------------------


def test_discounted_credit_falls_with_the_turns_that_follow():
    samples = [sample(1, 4, turn_of=[0, 0, 1, 2]), sample(0, 2, turn_of=[0, 1])]
    got = of(samples, adv_estimator="dr_grpo", turn_credit="discounted", turn_discount=0.5)
    assert got == [[0.125, 0.125, 0.25, 0.5], [-0.25, -0.5]]


def test_group_credit_compares_the_returns_of_the_same_turn():
    a = sample(1.5, 3, turn_of=[0, 0, 1], turn_rewards=[0.5, 0.0])  # turn returns .5 + .5 * 1 and 1
    b = sample(0.0, 2, turn_of=[0, 1], turn_rewards=[0.0, 0.0])
    c = sample(0.4, 1, turn_of=[0], turn_rewards=[0.4])
    got = of([a, b, c], adv_estimator="dr_grpo", turn_credit="group", turn_discount=0.5)
    first = np.array([1.0, 0.0, 0.4])
    np.testing.assert_allclose([got[0][0], got[1][0], got[2][0]], first - first.mean(), rtol=1e-6)
    assert got[0][1] == got[0][0]
    np.testing.assert_allclose([got[0][2], got[1][1]], [0.5, -0.5])


def test_a_turn_that_only_one_member_reached_gets_nothing():
    samples = [sample(1, 2, turn_of=[0, 1]), sample(0, 1)]
    assert of(samples, adv_estimator="grpo", turn_credit="group")[0][1] == 0.0


def test_group_credit_compares_turns_as_they_were_earned_where_one_has_expired():
    """`on_stale = "mask"`: neither a later turn nor the other members' comparison may notice."""
    settings = {"adv_estimator": "dr_grpo", "turn_credit": "group", "turn_discount": 0.5}
    other = sample(1.0, 3, turn_of=[0, 1, 2], turn_rewards=[0.0, 0.5, 0.0])
    rewards = [2.0, 0.25, 0.0]
    whole = of([other, sample(3.0, 3, turn_of=[0, 1, 2], turn_rewards=rewards)], **settings)
    first = of([other, sample(3.0, 2, turn_of=[1, 2], turn_rewards=rewards)], **settings)
    middle = of([other, sample(3.0, 2, turn_of=[0, 2], turn_rewards=rewards)], **settings)
    gone = of([other, sample(3.0, 0, turn_of=[], turn_rewards=rewards)], **settings)
    assert first == [whole[0], whole[1][1:]]
    assert middle == [whole[0], [whole[1][0], whole[1][2]]]
    assert gone == [whole[0], []]


def test_a_turns_reward_is_earned_by_its_last_token():
    one = sample(2.0, 4, turn_of=[0, 0, 1, 1], turn_rewards=[0.5, 0.25])
    np.testing.assert_allclose(one.earned(), [0, 0.5, 0, 1.5])
    assert one.earned().sum() == one.score


def test_what_a_turn_without_tokens_earned_stays_with_those_before_it():
    """Its tokens expired (`on_stale = "mask"`): no later turn may be credited with it."""
    first = sample(2.0, 2, turn_of=[1, 1], turn_rewards=[0.5, 0.25])
    np.testing.assert_allclose(first.earned(), [0.5, 1.5])
    middle = sample(2.0, 2, turn_of=[0, 2], turn_rewards=[0.0, 0.5, 0.0])
    np.testing.assert_allclose(middle.earned(), [0.5, 1.5])


def test_tokens_know_their_turn():
    t = trajectory(0, 0, [1, 2], [3, 4, 9, 9, 5], [1, 1, 0, 0, 1])
    t = turns(t, [(2, 4, 6), (6, 7, 7)])
    assert turn_of(t, np.flatnonzero(t.action_mask)).tolist() == [0, 0, 1]


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize("rewards", [[1.0], [0.3, 0.3, 0.3], [0.1 + 0.2, 0.1 + 0.2], [0.0, 0.0]])
def test_r2_a_group_of_one_or_without_contrast_gets_zero(estimator, rewards):
    assert group_advantages(np.array(rewards), estimator).tolist() == [0.0] * len(rewards)
    assert of([sample(r, 1) for r in rewards], adv_estimator=estimator) == [[0.0]] * len(rewards)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_r2_equal_returns_are_whitened_to_zero(estimator):
    assert of([sample(1, 1), sample(1, 1)], adv_estimator=estimator) == [[0.0], [0.0]]


def test_r2_groups_without_contrast_are_counted():
    flat = tuple(trajectory(0, i, [5, 6], [7, 8], [1, 1], reward=1.0) for i in range(3))
    assert plan(Batch(1, 0, (flat,)), settings()).groups_without_contrast == 1


def test_r1_only_scored_members_count():
    rewards = [1.0, None, 0.0, None, 1.0, 0.0, None, 1.0]
    group = tuple(trajectory(0, i, [5, 6], [7 + i], [1], reward=r) for i, r in enumerate(rewards))
    (update,) = plan(Batch(1, 0, (group,)), settings(adv_estimator="dr_grpo")).updates
    (micro,) = update.ranks[0]
    np.testing.assert_allclose(micro.advantages, [0.4, -0.6, 0.4, -0.6, 0.4], rtol=1e-6)


@pytest.mark.parametrize("estimator", [*sorted(GROUP_RELATIVE), "reinforce_plus_plus", "gae"])
def test_a_member_without_a_sampled_token_breaks_nothing(estimator):
    got = of([sample(1, 0), sample(0, 2), sample(1, 2)], adv_estimator=estimator)
    assert [len(a) for a in got] == [0, 2, 2]
    assert np.isfinite(np.concatenate(got)).all()


def test_the_overlong_penalty_falls_over_the_buffer():
    config = learner_config(overlong_buffer_tokens=4, overlong_penalty=2.0)
    assert [overlong_penalty(n, 10, config) for n in (3, 6, 7, 9, 10, 12)] == [0, 0, -0.5, -1.5, -2, -2]
    assert overlong_penalty(10, 10, learner_config()) == 0


def test_an_overlong_answer_loses_reward_in_the_plan():
    short = trajectory(0, 0, [5, 6], [7], [1], reward=1.0)
    long = trajectory(0, 1, [5, 6], [8] * 4, [1] * 4, reward=1.0)
    made = plan(
        Batch(1, 0, ((short, long),)),
        settings(max_sequence_tokens=4, adv_estimator="dr_grpo", overlong_buffer_tokens=2),
    )
    assert [s.reward for s in made.samples] == [1.0, 0.0]
    assert sorted(set(made.updates[0].ranks[0][0].advantages.tolist())) == [-0.5, 0.5]


def test_expired_tokens_count_for_the_length_that_is_punished():
    one = trajectory(0, 0, [5, 6], [8] * 4, [1] * 4, reward=1.0)
    made = plan(
        Batch(2, 1, ((mask_expired(one, 1), trajectory(0, 1, [5, 6], [7], [1], version=1)),)),
        settings(max_sequence_tokens=4, overlong_buffer_tokens=2),
    )
    assert [s.reward for s in made.samples] == [0.0, 0.0]
