"""Scoring episodes: all rewards at once, each under its deadline.

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


class Unscorable(Exception):
    """Why one reward has no value. Raise it in a reward: its text is kept on the trajectory."""


async def score(rewards: Sequence[Reward], episode: Episode) -> Score:
    """Sum of weight x value over the rewards that look at one trajectory, or None with the first reason.

    `components` holds every value that could be computed, unweighted; `episode.scores` the same. Rewards
    that see the group are left to `score_group`. Takes at most the longest deadline and a second.
    """
    own = [reward for reward in rewards if not reward.sees_group]
    return _sum(own, await asyncio.gather(*(_value(reward, episode) for reward in own)), episode)


async def score_group(
    rewards: Sequence[Reward], episodes: Sequence[Episode], scores: Sequence[Score]
) -> list[Score]:
    """`scores` (of `score`, one an episode) with the values of the rewards that see the group.

    The group is the members without an error: the others keep theirs and are not shown to anyone.
    """
    scored = [member for member, score in enumerate(scores) if score.error is None]
    group = tuple(episodes[member] for member in scored)
    wide = [reward for reward in rewards if reward.sees_group]
    columns = await asyncio.gather(*(_column(reward, group) for reward in wide)) if group else []
    result = list(scores)
    for place, member in enumerate(scored):
        more = _sum(wide, [column[place] for column in columns], episodes[member])
        result[member] = _plus(result[member], more)
    return result


def _sum(rewards: Sequence[Reward], outcomes: Sequence[float | Unscorable], episode: Episode) -> Score:
    values = {r.name: float(v) for r, v in zip(rewards, outcomes, strict=True) if isinstance(v, float)}
    episode.scores.update(values)
    for reward, outcome in zip(rewards, outcomes, strict=True):
        if isinstance(outcome, Unscorable) and reward.weight:  # one of weight 0 is only recorded
            return Score(None, values, str(outcome))
    total = math.fsum(r.weight * values[r.name] for r in rewards if r.weight)
    by_turn = [
        [reward.weight * part for part in value.turns]
        for reward, value in zip(rewards, outcomes, strict=True)
        if isinstance(value, _PerTurn)
    ]
    return Score(total, values, turn_rewards=tuple(map(math.fsum, zip(*by_turn, strict=True))))


class _PerTurn(float):
    """A reward given turn by turn: its sum, and the `turns`."""

    turns: tuple[float, ...] = ()


def _per_turn(values: Sequence[Any], episode: Episode) -> _PerTurn:
    if len(values) != len(episode.turns):
        raise Unscorable(f"returned {len(values)} values for {len(episode.turns)} turns")
    turns = tuple(_number(value) for value in values)
    total = _PerTurn(math.fsum(turns))
    total.turns = turns
    return total


def _plus(first: Score, second: Score) -> Score:
    error = first.error or second.error
    total = None if first.reward is None or second.reward is None else first.reward + second.reward
    return Score(total, {**first.components, **second.components}, error, first.turn_rewards)


async def _column(reward: Reward, group: Sequence[Episode]) -> list[float | Unscorable]:
    """The reward of every member: by one call, or by one call a member."""
    if not reward.once_a_group:
        return list(await asyncio.gather(*(_value(reward, episode, group) for episode in group)))
    try:
        values = await _call(reward, group[0], group)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(group):
            raise Unscorable(f"must return {len(group)} values, one for each of the group, not {values!r}")
    except Exception as error:  # noqa: BLE001 - any failure of a reward leaves the group unscored
        return [_reason(reward, error)] * len(group)
    return [_number_or_reason(reward, value) for value in values]


async def _value(reward: Reward, episode: Episode, group: Sequence[Episode] = ()) -> float | Unscorable:
    try:
        value = await _call(reward, episode, group)
        return _per_turn(value, episode) if isinstance(value, list | tuple) else _number(value)
    except Exception as error:  # noqa: BLE001 - any failure of a reward leaves the trajectory unscored
        return _reason(reward, error)


async def _call(reward: Reward, episode: Episode, group: Sequence[Episode]) -> Any:
    call = functools.partial(reward.fn, **arguments_of(reward, episode, group))
    return await finish(start(call, inspect.iscoroutinefunction(reward.fn)), reward.timeout_s)


def _number_or_reason(reward: Reward, value: Any) -> float | Unscorable:
    try:
        return _number(value)
    except Unscorable as error:
        return _reason(reward, error)


def _reason(reward: Reward, error: Exception) -> Unscorable:
    kind = "" if isinstance(error, Unscorable) else f"{type(error).__name__}: "
    return Unscorable(f"reward {reward.name!r}: {kind}{error}")


def _number(value: Any) -> float:
    if value is None:
        raise Unscorable("returned None")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise Unscorable(f"returned a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise Unscorable(f"returned {number}")
    return number
