"""Are these the calls that were wanted? Equality as the functions' schemas see it.

The rules are those of the Berkeley Function Calling Leaderboard's check, for which its lists of admissible
values were written: calls in any order; whole numbers and their floats are equal; texts are compared without
case, blanks and the signs `,./-_*^`; an argument may be absent where "" is admissible, or where leaving it
out means an admissible default. Besides, text that reads as the type that a schema wants is that value, as in
the execution of calls. Called by `tasks.function_calling`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.row_tools import callable_name
from toolcall import InvalidArguments, Tool
from toolcall.types import ToolCall

_IGNORED = re.compile(r"[\s,./\-_*^]")
ABSENT = ""  # among admissible values: the argument may be left out


class BadAnswer(ValueError):
    """What is meant to say which calls are right does not."""


@dataclass(frozen=True)
class Wanted:
    """One call: of each argument the admissible values."""

    name: str
    arguments: Mapping[str, Sequence[Any]]


def wanted_calls(truth: Any) -> list[Wanted]:
    """From `[{"f": {"x": [1, 2]}}]`, or `[{"name": "f", "arguments": {"x": 1}}]`, or JSON text of either.

    Raises BadAnswer.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise BadAnswer(f"not valid JSON ({error})") from error
    if not isinstance(truth, list):
        raise BadAnswer(f"must be a list of calls, but is a {type(truth).__name__}")
    return [_wanted(_without_nulls(entry)) for entry in truth]


def _without_nulls(entry: Any) -> Any:
    """Parquet gives each row the functions and arguments of all rows, null where there are none."""
    if not isinstance(entry, dict):
        return entry
    return {key: _without_nulls(value) for key, value in entry.items() if value is not None}


def _wanted(entry: Any) -> Wanted:
    if isinstance(entry, dict) and entry.keys() == {"name", "arguments"} and isinstance(entry["name"], str):
        name, arguments = entry["name"], entry["arguments"]
        if isinstance(arguments, dict):
            return Wanted(callable_name(name), {key: [value] for key, value in arguments.items()})
    elif isinstance(entry, dict) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        if isinstance(arguments, dict) and all(isinstance(each, list) for each in arguments.values()):
            return Wanted(callable_name(name), arguments)
    raise BadAnswer(
        f'{json.dumps(entry, default=str)[:100]} is no call; write {{"f": {{"x": [admissible values]}}}} or '
        '{"name": "f", "arguments": {"x": value}}'
    )


def calls_match(calls: Sequence[ToolCall], wanted: Sequence[Wanted], tools: Mapping[str, Tool]) -> bool:
    """Does each call answer one of `wanted`, and none is left?"""
    if len(calls) != len(wanted):
        return False
    if not calls:
        return True
    return any(
        call_matches(calls[0], each, tools) and calls_match(calls[1:], [*wanted[:i], *wanted[i + 1 :]], tools)
        for i, each in enumerate(wanted)
    )


def call_matches(call: ToolCall, wanted: Wanted, tools: Mapping[str, Tool]) -> bool:
    tool = tools.get(call.name)
    if tool is None or call.name != wanted.name:
        return False
    try:
        arguments = tool.signature.validate(call.arguments)
    except InvalidArguments:
        return False
    if any(name not in wanted.arguments for name in arguments):
        return False
    properties = tool.signature.parameters["properties"]
    return all(
        _fits(arguments[name], admissible)
        if name in arguments
        else ABSENT in admissible or _fits(_default(properties.get(name)), admissible)
        for name, admissible in wanted.arguments.items()
    )


def valid(call: ToolCall, tools: Mapping[str, Tool]) -> bool:
    """Would an offered function accept it?"""
    try:
        return call.name in tools and tools[call.name].validate(call.arguments) is not None
    except InvalidArguments:
        return False


def _default(schema: Any) -> Any:
    return schema.get("default") if isinstance(schema, dict) else None


def _fits(value: Any, admissible: Sequence[Any]) -> bool:
    return any(_same(value, option) for option in admissible)


def _same(value: Any, option: Any) -> bool:
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    if isinstance(value, str) and isinstance(option, str):
        return _plain(value) == _plain(option)
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(map(_same, value, option))
    if isinstance(value, dict) and isinstance(option, dict):
        return _same_object(value, option)
    return value is not None and value == option


def _same_object(value: dict[str, Any], option: dict[str, Any]) -> bool:
    """Inside an object too, each field has a list of admissible values, or is a plain value."""
    if any(name not in option for name in value):
        return False
    return all(
        _same(value[name], wanted) or (isinstance(wanted, list) and _fits(value[name], wanted))
        if name in value
        else isinstance(wanted, list) and ABSENT in wanted
        for name, wanted in option.items()
    )


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')
