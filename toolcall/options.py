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


@dataclass(frozen=True)
class ToolOptions:
    """Of one tool. Each name is a keyword of `@tool` and a key of `[task.tool_options.<tool>]`."""

    timeout: float = 30.0  # seconds of one attempt, waiting for a slot not counted
    max_concurrency: int = 32  # running at once in one executor
    idempotent: bool = False  # running twice is the same as once: a precondition of retries
    retries: int = 0  # after a timeout or an infrastructure failure
    cache: bool = False  # equal arguments share one run, across trajectories
    max_output_chars: int | None = None  # None: the executor's

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
    if options.timeout <= 0:
        yield f"timeout = {options.timeout} must be above 0 seconds"
    if options.max_concurrency < 1:
        yield f"max_concurrency = {options.max_concurrency} would let no call run; use 1 or more"
    if options.retries < 0:
        yield f"retries = {options.retries} must be 0 or more"
    if options.retries and not options.idempotent:
        yield "retries need idempotent=True, since a failed call may have had its effect"
    if options.cache and not options.idempotent:
        yield "cache=True needs idempotent=True, since equal calls then run once"
    if options.max_output_chars is not None and options.max_output_chars < 1:
        yield f"max_output_chars = {options.max_output_chars} must be 1 or more"


def _wrong_kind(name: str, hint: str, value: Any) -> Iterable[str]:
    """A config file may hold anything; True is no number here."""
    kinds = [_KINDS[part.strip()] for part in hint.split("|")]
    fits = any(isinstance(value, kind) for kind, _ in kinds)
    if not fits or (isinstance(value, bool) and "bool" not in hint):
        yield f"{name} = {value!r} must be {' or '.join(words for _, words in kinds)}"
