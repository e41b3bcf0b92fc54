"""The `@reward` decorator: from a function to a `Reward`, and filling its arguments by name.

Invariant: a reward whose parameters cannot be filled is refused when the task is loaded, before any model
starts. Called by users' modules, `tasks.loading` and `tasks.scoring`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, overload

from tasks.types import Episode, Reward

EPISODE_NAMES = ("episode", "trajectory")  # both are the Episode; they win over row fields of that name
RESERVED_NAMES = (*EPISODE_NAMES, "row")


class BadReward(TypeError):
    """A function that cannot serve as a reward; the message says why and what there is."""


@overload
def reward(fn: Callable[..., Any], /) -> Reward: ...
@overload
def reward(*, weight: float = 1.0, name: str | None = None) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(fn: Callable[..., Any] | None = None, /, *, weight: float = 1.0, name: str | None = None) -> Any:
    """Make a reward of an async or sync function: `@reward` or `@reward(weight=0.5)`.

    Parameters are filled by name: `episode` or `trajectory` (the `Episode`), `row` (the data row), and any
    field of the row. It returns a finite number; None or an exception makes the trajectory unscorable.
    """
    if fn is None:
        return lambda function: _make(function, weight, name)
    return _make(fn, weight, name)


def arguments_of(reward: Reward, episode: Episode) -> dict[str, Any]:
    """The reward function's arguments for this episode. Raises BadReward if the row lacks a field."""
    available: dict[str, Any] = {
        **episode.row,
        **dict.fromkeys(EPISODE_NAMES, episode),
        "row": episode.row,
    }
    check_parameters(reward, available)
    wanted = inspect.signature(reward.fn).parameters
    return {name: available[name] for name in wanted if name in available}


def check_parameters(reward: Reward, available: Collection[str]) -> None:
    """Raise BadReward if a parameter without a default is not among row fields and reserved names."""
    for parameter in inspect.signature(reward.fn).parameters.values():
        known = parameter.name in available or parameter.name in RESERVED_NAMES
        if not known and parameter.default is inspect.Parameter.empty:
            fields = ", ".join(sorted(set(available) - set(RESERVED_NAMES))) or "none"
            raise BadReward(
                f"reward {reward.name!r} asks for {parameter.name!r}, which the row does not have; "
                f"there is: {', '.join(RESERVED_NAMES)} and the row's fields: {fields}"
            )


def _make(fn: Any, weight: float, name: str | None) -> Reward:
    if not inspect.isfunction(fn):
        raise BadReward(f"@reward takes a function, not {fn!r}")
    name = name or fn.__name__
    if not math.isfinite(weight):
        raise BadReward(f"reward {name!r}: weight = {weight} must be a finite number")
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadReward(
                f"reward {name!r}: arguments are passed by name, so {parameter.name!r} cannot be "
                "positional-only, * or **"
            )
    return Reward(name, fn, weight)
