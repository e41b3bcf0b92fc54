"""The `@reward` decorator: from a function to a `Reward`, and filling its arguments by name.

Invariant: a reward whose parameters cannot be filled is refused when the task is loaded, before any model
starts. Called by users' modules, `tasks.loading` and `tasks.scoring`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_type_hints, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tasks.types import EPISODE_NAMES, Episode, Reward

RESERVED_NAMES = (*EPISODE_NAMES, "group", "row", "context")


class BadReward(TypeError):
    """A function that cannot serve as a reward; the message says why and what there is."""


@overload
def reward(fn: Callable[..., Any], /) -> Reward: ...
@overload
def reward(
    *, weight: float = 1.0, name: str | None = None, timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    weight: float = 1.0,
    name: str | None = None,
    timeout: float = 60.0,
) -> Any:
    """Make a reward of an async or sync function: `@reward` or `@reward(weight=0.5)`.

    Parameters are filled by name: `episode` or `trajectory` (the `Episode`), `group` (all members that can
    be scored), `row` (the data row), `context` (the `ToolContext` that this trajectory's tools got), any
    field of the row, and what the config sets as options. It returns a finite number, or a list of one
    for each turn of the trajectory (it counts as their sum, see `learner.turn_credit`); None or an exception
    (`Unscorable` says the reason best) makes the trajectory unscorable, and so does silence for `timeout`
    seconds. With `group` but no trajectory it returns a value for each member instead.
    """
    if fn is None:
        return lambda function: _make(function, weight, name, timeout)
    return _make(fn, weight, name, timeout)


def arguments_of(reward: Reward, episode: Episode, group: Sequence[Episode] = ()) -> dict[str, Any]:
    """The reward function's arguments for this episode. Raises BadReward if the row lacks a field."""
    check_parameters(reward, episode.row)
    available: dict[str, Any] = dict(reward.options)
    for name, parameter in reward.parameters.items():
        field = reward.fields.get(name, name)
        if name in available or name in RESERVED_NAMES or field not in episode.row:
            continue
        value = episode.row[field]
        if isinstance(value, float) and math.isnan(value):
            value = None  # as tables write what is missing; "nan" would be the right answer
        if value is not None or _takes_none(reward.fn, name):
            available[name] = _typed(reward.fn, name, value, f"reward {reward.name!r}: {field}")
        elif parameter.default is inspect.Parameter.empty:  # "None" would be the right answer
            raise BadReward(
                f"reward {reward.name!r} asks for {field!r}, which is null in this row; give it a value, or "
                "let the reward's type hint allow None"
            )
    available |= {
        **dict.fromkeys(EPISODE_NAMES, episode),
        "group": tuple(group),
        "row": episode.row,
        "context": episode.context,
    }
    return {name: available[name] for name in reward.parameters if name in available}


def check_parameters(reward: Reward, row: Collection[str]) -> None:
    """Raise BadReward if a parameter cannot be filled from a row with these fields."""
    for name, parameter in reward.parameters.items():
        if name in reward.options:
            continue
        if name in RESERVED_NAMES:
            if name in row:
                raise BadReward(
                    f"reward {reward.name!r} asks for {name!r}, which is a reserved name and a field of the "
                    f'row; ask for row and read row["{name}"], or rename the field'
                )
            continue
        field = reward.fields.get(name, name)
        if field not in row and (parameter.default is inspect.Parameter.empty or name in reward.fields):
            fields = ", ".join(sorted(set(row) - set(RESERVED_NAMES))) or "none"
            raise BadReward(
                f"reward {reward.name!r} asks for {field!r}, which the row does not have; "
                f"there is: {', '.join(RESERVED_NAMES)} and the row's fields: {fields}"
            )


def configured(reward: Reward, settings: Mapping[str, Any]) -> Reward:
    """The reward with the name, weight, timeout, options and fields that a config gives it.

    Options are checked against the function's type hints. Raises BadReward.
    """
    options, fields = settings.get("options", {}), settings.get("fields", {})
    for kind, names in (("options", options), ("fields", fields)):
        if not isinstance(names, Mapping):
            raise BadReward(f"reward {reward.name!r}: {kind} must be a table, not {names!r}")
        for name in names:
            if name in RESERVED_NAMES or name not in reward.parameters:
                takes = ", ".join(n for n in reward.parameters if n not in RESERVED_NAMES) or "none"
                raise BadReward(f"reward {reward.name!r}: {kind} has no {name!r}; it takes: {takes}")
    where = f"reward {reward.name!r}: options"
    typed = {name: _typed(reward.fn, name, value, f"{where}.{name}") for name, value in options.items()}
    made = _make(
        reward.fn,
        settings.get("weight", reward.weight),
        settings.get("name", reward.name),
        settings.get("timeout", reward.timeout_s),
    )
    return replace(made, options=typed, fields=dict(fields))


def _typed(fn: Callable[..., Any], name: str, value: Any, what: str) -> Any:
    """`value` as the parameter's type hint has it ("3" of a CSV file is 3 for an int). Raises BadReward."""
    adapter = _adapters(fn).get(name)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise BadReward(f"{what} = {value!r} is refused: {reason}") from None


def _takes_none(fn: Callable[..., Any], name: str) -> bool:
    adapter = _adapters(fn).get(name)
    try:
        return adapter is not None and adapter.validate_python(None) is None
    except ValidationError:
        return False


@lru_cache(maxsize=256)
def _adapters(fn: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    try:
        hints = get_type_hints(fn, include_extras=True)
    except NameError:  # hints of names that only a type checker imports
        return {}
    loose = ConfigDict(arbitrary_types_allowed=True)
    return {
        name: TypeAdapter(hint, config=loose)
        for name, hint in hints.items()
        if hint is not Any and name not in (*RESERVED_NAMES, "return")
    }


def _make(fn: Any, weight: float, name: str | None, timeout: float) -> Reward:
    if not inspect.isfunction(fn):
        raise BadReward(f"@reward takes a function, not {fn!r}")
    name = name or fn.__name__
    if not isinstance(name, str):
        raise BadReward(f"a reward's name must be text, not {name!r}")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise BadReward(f"reward {name!r}: weight = {weight!r} must be a finite number")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise BadReward(f"reward {name!r}: timeout = {timeout!r} must be a number of seconds above 0")
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadReward(
                f"reward {name!r}: arguments are passed by name, so {parameter.name!r} cannot be "
                "positional-only, * or **"
            )
    return Reward(name, fn, weight, timeout)
