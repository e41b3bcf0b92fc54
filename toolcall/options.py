"""The limits under which the executor runs a tool: from the decorator, overridden by a run's config.

Invariant: options that were built can be kept; the rest was refused with `BadTool`, naming the tool.
Made by `toolcall.registry`, obeyed by the executor and its lanes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from toolcall.errors import BadTool

CACHES = ("memory", "disk")
SIDES = ("head", "tail", "both")


@dataclass(frozen=True)
class ToolOptions:
    """Of one tool. Each name is a keyword of `@tool` and a key of `[task.tool_options.<tool>]`."""

    timeout: float = 30.0  # seconds of one attempt, waiting for a slot not counted
    queue_timeout: float = 60.0  # seconds of waiting for a slot
    max_concurrency: int = 32  # running at once in one executor, over all its trajectories
    run_concurrency: int | None = None  # running at once in all actors of a run on one host
    rate_limit: float | None = None  # calls begun per second in all actors of a run on one host
    idempotent: bool = False  # running twice is the same as once: a precondition of retries
    retries: int = 0  # after a timeout or an infrastructure failure
    backoff: float = 0.2  # seconds before the first retry; doubles, with jitter, up to the next
    cache: bool | str = False  # equal arguments share one run: True or "memory", or "disk"
    cache_ttl: float | None = None  # seconds that a kept result is served; None: for ever
    version: str = ""  # part of the cache's key, beside the function's source
    max_output_tokens: int | None = None  # of a result; None: the executor's
    keep: str = "head"  # the side of a longer result that is kept: head, tail or both
    breaker_threshold: int = 8  # timeouts and infrastructure failures in a row before it is refused
    breaker_cooldown: float = 30.0  # seconds until it is tried again

    @classmethod
    def of(cls, tool: str, given: Mapping[str, Any], base: ToolOptions | None = None) -> ToolOptions:
        """`base` with what was given for the tool of that name instead."""
        for name in given:
            if name not in OPTION_NAMES:
                raise BadTool(f"tool {tool!r}: there is no option {name!r}{nearest(name, OPTION_NAMES)}")
        before = {name: getattr(base, name) for name in OPTION_NAMES} if base else {}
        options = cls(**{**before, **given})
        for problem in _problems(options):
            raise BadTool(f"tool {tool!r}: {problem}")
        return options


OPTION_NAMES = tuple(field.name for field in fields(ToolOptions))
_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "text"),
    "None": (type(None), "nothing"),
}


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or all there are when nothing is close."""
    known = list(candidates)
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known) or 'none'}"


def _problems(options: ToolOptions) -> Iterable[str]:
    for field in fields(ToolOptions):
        yield from _wrong_kind(field.name, str(field.type), getattr(options, field.name))
    for name in ("timeout", "queue_timeout", "rate_limit", "cache_ttl", "breaker_cooldown"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            yield f"{name} = {value} must be above 0"
    for name in ("max_concurrency", "run_concurrency", "max_output_tokens", "breaker_threshold"):
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"{name} = {value} must be 1 or more"
    for name in ("retries", "backoff"):
        if getattr(options, name) < 0:
            yield f"{name} = {getattr(options, name)} must be 0 or more"
    if isinstance(options.cache, str) and options.cache not in CACHES:
        yield f"cache = {options.cache!r} must be true, false or one of {', '.join(CACHES)}"
    if options.keep not in SIDES:
        yield f"keep = {options.keep!r} must be one of {', '.join(SIDES)}"
    if options.retries and not options.idempotent:
        yield "retries need idempotent=True, since a failed call may have had its effect"
    if options.cache and not options.idempotent:
        yield "a cache needs idempotent=True, since equal calls then run once"


def _wrong_kind(name: str, hint: str, value: Any) -> Iterable[str]:
    """A config file may hold anything; True is no number here."""
    kinds = [_KINDS[part.strip()] for part in hint.split("|")]
    fits = any(isinstance(value, kind) for kind, _ in kinds)
    if not fits or (isinstance(value, bool) and "bool" not in hint):
        yield f"{name} = {value!r} must be {' or '.join(words for _, words in kinds)}"
