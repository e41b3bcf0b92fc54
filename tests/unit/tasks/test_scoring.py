"""Rewards: how they are declared, filled and summed, and that a failure is never a 0."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tasks import Reward, Score, Unscorable, reward, score
from tasks.reward import BadReward, check_parameters, configured
from tasks.scoring import score_group
from tests.unit.tasks.support import episode
from tests.unit.toolcall.support import run_virtual


@reward
def right(episode, answer: str) -> float:
    return float(episode.text == answer)


@reward(weight=0.5, name="short")
async def brevity(trajectory, row: dict[str, Any], limit: int = 10) -> float:
    assert row["answer"]
    return float(len(trajectory.text) <= limit)


def giving(value: Any) -> Reward:
    return Reward("given", lambda: value)


def test_a_decorated_function_is_a_reward_and_stays_callable():
    assert (right.name, right.weight) == ("right", 1.0)
    assert (brevity.name, brevity.weight) == ("short", 0.5)
    assert right(episode("84"), "84") == 1.0


def test_the_score_is_the_weighted_sum_of_components():
    scored = asyncio.run(score([right, brevity], episode("84")))
    assert (scored.reward, scored.error) == (1.5, None)
    assert scored.components == {"right": 1.0, "short": 1.0}


def test_parameters_are_filled_by_name_and_row_fields_can_fill_defaults():
    scored = asyncio.run(score([brevity], episode("84", limit=1)))
    assert scored.reward == 0.0


def test_the_values_stay_on_the_episode_for_success():
    scored = episode("84")
    asyncio.run(score([right], scored))
    assert scored.scores == {"right": 1.0}


@pytest.mark.parametrize("value", [True, 1, 0.25])
def test_numbers_are_scores(value):
    assert asyncio.run(score([giving(value)], episode(""))).reward == float(value)


def test_a_reward_of_turns_counts_as_their_sum_and_says_who_earned_it():
    rewards = [Reward("steps", lambda: [0.5, 0.0], weight=2.0), Reward("more", lambda: (0.1, 0.2))]
    scored = asyncio.run(score(rewards, episode("let me see", "84")))
    assert scored.reward == pytest.approx(2 * 0.5 + 0.3)
    assert scored.components == pytest.approx({"steps": 0.5, "more": 0.3})
    assert scored.turn_rewards == pytest.approx((1.1, 0.2))
    assert asyncio.run(score([right], episode("84"))).turn_rewards == ()


def test_r3_values_for_too_few_turns_are_unscorable():
    scored = asyncio.run(score([Reward("steps", lambda: [0.5])], episode("one", "two")))
    assert scored.reward is None and scored.error == "reward 'steps': returned 1 values for 2 turns"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1", "returned a str, not a number"),
        ({1}, "returned a set, not a number"),
    ],
)
def test_r3_what_is_no_number_is_unscorable(value, says):
    scored = asyncio.run(score([right, giving(value)], episode("84")))
    assert scored.reward is None and scored.error is not None
    assert "'given'" in scored.error and says in scored.error
    assert scored.components == {"right": 1.0}


def test_a_reward_of_weight_0_is_recorded_and_cannot_leave_a_trajectory_unscored():
    watched = [right, Reward("f1", lambda: 0.5, 0.0), Reward("broken", lambda: None, 0.0)]
    scored = asyncio.run(score(watched, episode("84")))
    assert (scored.reward, scored.error) == (1.0, None)
    assert scored.components == {"right": 1.0, "f1": 0.5}


@pytest.mark.parametrize("is_async", [True, False])
def test_r3_a_reward_that_raises_is_unscorable_with_the_reason(is_async):
    def broken() -> float:
        raise ConnectionError("judge is down")

    async def broken_async() -> float:
        broken()
        return 0.0

    scored = asyncio.run(score([Reward("judge", broken_async if is_async else broken)], episode("84")))
    assert scored.reward is None
    assert scored.error == "reward 'judge': ConnectionError: judge is down"


def test_r3_a_reward_that_hangs_is_unscorable_after_its_deadline():
    async def hang() -> float:
        await asyncio.sleep(3600)
        return 1.0

    async def scenario():
        scored = await score([right, Reward("judge", hang, timeout_s=30)], episode("84"))
        return scored, asyncio.get_running_loop().time()

    scored, elapsed = run_virtual(_without_threads(scenario))
    assert scored.reward is None and "no answer within 30 s" in scored.error
    assert elapsed == pytest.approx(30)


async def _without_threads(scenario):
    return await scenario()


def test_r3_a_blocking_reward_that_hangs_does_not_hold_the_scores_up():
    release = threading.Event()
    scored = asyncio.run(score([Reward("judge", lambda: release.wait(30), timeout_s=0.02)], episode("84")))
    release.set()
    assert scored.reward is None and "DeadlineExceeded" in (scored.error or "")


def test_rewards_run_at_the_same_time():
    async def slow() -> float:
        await asyncio.sleep(10)
        return 1.0

    async def scenario():
        await score([Reward("a", slow), Reward("b", slow)], episode("84"))
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(10)


def test_cancelling_the_scoring_cancels_the_rewards():
    ended = []

    async def slow() -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)
        return 1.0

    async def scenario():
        task = asyncio.create_task(score([Reward("a", slow)], episode("84")))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(scenario())
    assert ended == [1]


def test_an_unknown_parameter_is_refused_with_what_there_is():
    @reward
    def wrong(episode, anwser: str) -> float:
        return 0.0

    with pytest.raises(BadReward) as error:
        check_parameters(wrong, {"question": "", "answer": ""})
    for word in ("'wrong'", "'anwser'", "trajectory, group, row, context", "answer, question"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: reward(weight=float("nan"))(lambda: 1.0), "finite"),
        (lambda: reward(len), "takes a function"),
        (lambda: reward(lambda *episode: 1.0), "passed by name"),
        (lambda: reward(lambda **row: 1.0), "passed by name"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(make, says):
    with pytest.raises(BadReward, match=says):
        make()


# --- the group ---------------------------------------------------------------------------------------


@reward(weight=2.0)
def shortest(group) -> list[float]:
    """Once a group: a value for each member."""
    least = min(len(member.text) for member in group)
    return [float(len(member.text) == least) for member in group]


@reward
def unlike_the_others(trajectory, group) -> float:
    """Once a member."""
    return float(sum(member.text == trajectory.text for member in group) == 1)


def scored_together(rewards, *episodes, errors=()):
    async def scenario():
        scores = [
            Score(None, error=errors[i]) if i < len(errors) and errors[i] else await score(rewards, made)
            for i, made in enumerate(episodes)
        ]
        return await score_group(rewards, episodes, scores)

    return asyncio.run(scenario())


def test_group_rewards_are_added_to_a_members_own():
    scores = scored_together([right, shortest, unlike_the_others], *map(episode, ("84", "8400", "8400")))
    assert [s.reward for s in scores] == [1.0 + 2.0 + 1.0, 0.0, 0.0]
    assert scores[0].components == {"right": 1.0, "shortest": 1.0, "unlike_the_others": 1.0}


def test_r1_failed_members_are_neither_scored_nor_shown_to_the_others():
    down = [None, "tool search: gone", None, "tool search: gone"]
    scores = scored_together([right, shortest], *map(episode, ("84", "", "840", "")), errors=down)
    assert [s.reward for s in scores] == [3.0, None, 0.0, None]
    assert scores[1].error == "tool search: gone" and scores[1].components == {}


def test_r1_a_group_that_failed_whole_asks_nobody():
    def never(group) -> list[float]:
        raise AssertionError("asked about nobody")

    (only,) = scored_together([Reward("rank", never)], episode("84"), errors=["gone"])
    assert only.error == "gone"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0], "must return 2 values"),
        (1.0, "must return 2 values"),
        ("ab", "must return 2 values"),
        ({1.0, 2.0}, "must return 2 values"),
        (None, "must return 2 values"),
    ],
)
def test_r3_a_group_reward_of_the_wrong_length_leaves_all_unscored(value, says):
    scores = scored_together([right, Reward("rank", lambda group: value)], episode("84"), episode("85"))
    assert all(s.reward is None and says in (s.error or "") for s in scores)
    assert scores[0].components == {"right": 1.0}


def test_r3_a_group_reward_may_leave_single_members_unscored():
    scores = scored_together([Reward("rank", lambda group: [None, 1.0])], episode("84"), episode("85"))
    assert [s.reward for s in scores] == [None, 1.0]
    assert scores[0].error == "reward 'rank': returned None"


def test_r3_the_reason_for_being_unscorable_is_the_rewards_own():
    def judge() -> float:
        raise Unscorable("the judge gave no verdict")

    scored = asyncio.run(score([Reward("judge", judge)], episode("84")))
    assert scored.error == "reward 'judge': the judge gave no verdict"


# --- arguments ---------------------------------------------------------------------------------------


def test_a_reward_sees_what_the_tools_left_in_the_context():
    made = episode("84")
    made.context.state["files"] = {"a.txt": "84"}
    final_state = Reward("state", lambda context, answer: float(context.state["files"]["a.txt"] == answer))
    assert asyncio.run(score([final_state], made)).reward == 1.0


def test_the_config_sets_options_fields_name_and_weight():
    @reward
    def near(episode, target: float, tolerance: float = 0.1) -> float:
        return float(abs(float(episode.text) - target) <= tolerance)

    settings = {"name": "close", "weight": 0.5, "options": {"tolerance": 2}, "fields": {"target": "gold"}}
    made = configured(near, settings)
    assert (made.name, made.weight) == ("close", 0.5)
    assert asyncio.run(score([made], episode("84", gold=83))).reward == 0.5
    assert asyncio.run(score([made], episode("84", gold=80))).reward == 0.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"options": {"limt": 3}}, "options has no 'limt'; it takes: limit"),
        ({"options": {"trajectory": 3}}, "options has no 'trajectory'"),
        ({"options": {"limit": "many"}}, "options.limit = 'many' is refused"),
        ({"options": 3}, "options must be a table"),
        ({"fields": {"limt": "x"}}, "fields has no 'limt'"),
        ({"weight": "heavy"}, "weight = 'heavy'"),
        ({"timeout": 0}, "timeout = 0"),
        ({"name": 3}, "name must be text"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(BadReward, match=says):
        configured(brevity, settings)


def test_a_field_named_like_a_reserved_argument_is_not_mistaken_for_it():
    with pytest.raises(BadReward, match=r'read row\["context"\]'):
        check_parameters(Reward("r", lambda context: 0.0), {"context": "a passage"})
    check_parameters(Reward("r", lambda row: 0.0), {"context": "a passage"})
