"""Rewards: how they are declared, filled and summed, and that a failure is never a 0."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tasks import Reward, reward, score
from tasks.reward import BadReward, check_parameters
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


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1", "returned a str, not a number"),
        ([1], "returned a list, not a number"),
    ],
)
def test_r3_what_is_no_number_is_unscorable(value, says):
    scored = asyncio.run(score([right, giving(value)], episode("84")))
    assert scored.reward is None and scored.error is not None
    assert "'given'" in scored.error and says in scored.error
    assert scored.components == {"right": 1.0}


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
        scored = await score([right, Reward("judge", hang)], episode("84"), timeout_s=30)
        return scored, asyncio.get_running_loop().time()

    scored, elapsed = run_virtual(_without_threads(scenario))
    assert scored.reward is None and "no answer within 30 s" in scored.error
    assert elapsed == pytest.approx(30)


async def _without_threads(scenario):
    return await scenario()


def test_r3_a_blocking_reward_that_hangs_does_not_hold_the_scores_up():
    release = threading.Event()
    scored = asyncio.run(score([Reward("judge", lambda: release.wait(30))], episode("84"), timeout_s=0.02))
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
    for word in ("'wrong'", "'anwser'", "episode, trajectory, row", "answer, question"):
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
