"""Scoring an episode: all rewards at once, each under a deadline.

Invariant: a reward that cannot be computed makes the trajectory unscorable, with the reason; it never
counts as 0, which would teach the model to avoid what broke the judge. Called by `actors.agent_loop`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

from tasks.reward import arguments_of
from tasks.types import Episode, Reward, Score
from toolcall.work import finish, start

DEFAULT_TIMEOUT_S = 60.0


class Unscorable(Exception):
    """Why one reward has no value."""


async def score(
    task_rewards: Sequence[Reward], episode: Episode, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Score:
    """Sum of weight x value over the rewards, or None with the first reward's reason.

    `components` holds every value that could be computed, unweighted; `episode.scores` the same.
    Takes at most `timeout_s` and a second.
    """
    outcomes = await asyncio.gather(*(_value(reward, episode, timeout_s) for reward in task_rewards))
    values = {r.name: v for r, v in zip(task_rewards, outcomes, strict=True) if isinstance(v, float)}
    episode.scores.update(values)
    for outcome in outcomes:
        if isinstance(outcome, Unscorable):
            return Score(None, values, str(outcome))
    return Score(math.fsum(reward.weight * values[reward.name] for reward in task_rewards), values)


async def _value(reward: Reward, episode: Episode, timeout_s: float) -> float | Unscorable:
    try:
        call = functools.partial(reward.fn, **arguments_of(reward, episode))
        work = start(call, is_async=inspect.iscoroutinefunction(reward.fn))
        return _number(await finish(work, timeout_s))
    except Exception as error:  # noqa: BLE001 - any failure of a reward leaves the trajectory unscored
        return Unscorable(f"reward {reward.name!r}: {type(error).__name__}: {error}")


def _number(value: Any) -> float:
    if value is None:
        raise Unscorable("returned None")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise Unscorable(f"returned a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise Unscorable(f"returned {number}")
    return number
