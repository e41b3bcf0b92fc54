"""What the syntaxes share: from JSON to a call, reasons that help the model, and the base of all parsers
whose results are tool messages.

Invariant: arguments are complete or absent; a reason says where and why, in the words of the syntax.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from toolcall.parsers.results import guarded, shown
from toolcall.parsers.tolerant_json import BrokenJson, read_value
from toolcall.types import ParseFailure, ToolCall, ToolResult

EXAMPLE = '{"name": "tool", "arguments": {"argument": "value"}}'
NEAR_CHARS = 20
_KEYS = ("name", "id", "type", "arguments", "parameters")


class NotACall(ValueError):
    """The text of a call is not a call. `name`: the tool it names, if it does; `end`: where the text of the
    call ends, if it could be read to its end."""

    def __init__(self, reason: str, name: str | None = None, end: int | None = None) -> None:
        super().__init__(reason)
        self.name = name
        self.end = end

    def failure(self, start: int, end: int) -> ParseFailure:
        return ParseFailure("", str(self), self.name, (start, end))


class MessageSyntax:
    """The base of the syntaxes whose results are tool messages.

    schemas: the tools' OpenAI-style schemas, for syntaxes that need the names or types.
    """

    name = ""
    stop: tuple[str, ...] = ()
    inline = False
    markers: tuple[str, ...] = ()
    result_tag = ""
    targets: tuple[tuple[str, str], ...] = ()

    def __init__(self, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
        self.schemas = {schema["function"]["name"]: schema["function"] for schema in schemas}

    def for_tools(self, schemas: Sequence[Mapping[str, Any]]) -> Self:
        other = copy.copy(self)
        MessageSyntax.__init__(other, schemas)
        return other

    def offered_as(self, tool: str) -> str:
        return tool

    def render_result(self, result: ToolResult, *, wrapped: bool = False) -> str:
        return self.render_text(shown(result), wrapped=wrapped)

    def render_text(self, text: str, *, wrapped: bool = False) -> str:
        tag = self.result_tag
        if not tag:
            return text
        return f"<{tag}>\n{guarded(text, tag)}\n</{tag}>" if wrapped else guarded(text, tag)


def offer_text(schemas: Sequence[Mapping[str, Any]], how: str) -> str:
    """Words for a system message that offer the tools and say how to call one."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You can call tools. Their signatures, one JSON object a line:\n<tools>\n{lines}\n</tools>\n{how}"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_json(call: ToolCall, key: str = "arguments") -> str:
    return as_json({"name": call.name, key: call.arguments})


def cut_off(before: str = "it was complete") -> str:
    return f"the call was cut off by the token limit before {before}, so it did not run"


def read_json(text: str, start: int, truncated: bool, name: str | None = None) -> tuple[Any, int]:
    """The JSON value at `start` and the index after it; raises NotACall saying where it breaks."""
    try:
        return read_value(text, start)
    except BrokenJson as error:
        raise NotACall(where_it_broke(text, start, error, truncated), name) from None


def where_it_broke(text: str, start: int, error: BrokenJson, truncated: bool, what: str = "JSON") -> str:
    if error.cut_off and truncated:
        return cut_off(f"its {what} was complete")
    near = text[error.position : error.position + NEAR_CHARS]
    place = f" (near {near!r})" if near else ""
    return f"the call's {what} is broken at character {error.position - start + 1}: {error.why}{place}"


def name_and_arguments(value: Any, example: str = EXAMPLE) -> tuple[str, dict[str, Any]]:
    """What a call's JSON object means. Raises NotACall where that is not clear."""
    if not isinstance(value, dict):
        raise NotACall(f"a call must be one JSON object, as in {example}, but is {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise NotACall(f'the call does not say which tool: put its name under "name", as in {example}')
    keys = [key for key in ("arguments", "parameters") if key in value]
    if len(keys) == 2:
        raise NotACall('the call has both "arguments" and "parameters"; keep "arguments"', name)
    others = [key for key in value if key not in _KEYS]
    if others and not keys:
        raise NotACall(f'put {", ".join(map(repr, others))} under "arguments", as in {example}', name)
    return name, arguments_object(value[keys[0]] if keys else None, name)


def call_from(value: Any, start: int, end: int, example: str = EXAMPLE) -> ToolCall:
    """The call that a JSON value means, read from `start` to `end`. Raises NotACall."""
    try:
        name, arguments = name_and_arguments(value, example)
    except NotACall as error:
        raise NotACall(str(error), error.name, end) from None
    return ToolCall("", name, arguments, (start, end))


def one_call(
    marker: re.Match[str], read: Callable[[], ToolCall], end_of_broken: Callable[[], int]
) -> tuple[Sequence[ToolCall | ParseFailure], int]:
    """What `marker` opens: the call that `read` gives or a failure in its place, and where reading goes on.

    `end_of_broken` is asked where the text of a broken call ends if `read` has not said so.
    """
    try:
        call = read()
    except NotACall as error:
        end = error.end or end_of_broken()
        return [error.failure(marker.start(), end)], end
    return [call], call.position[1]


def no_call(marker: re.Match[str], reason: str) -> tuple[Sequence[ParseFailure], int]:
    """`marker` alone is a failure: it closes or opens nothing."""
    return [ParseFailure("", reason, position=marker.span())], marker.end()


def next_marker(pattern: re.Pattern[str], text: str, start: int, closer: str = "") -> int:
    """Where reading goes on after a broken call: after its `closer`, or before the next other marker."""
    following = pattern.search(text, start)
    if following is None:
        return len(text)
    return following.end() if following[0] == closer else following.start()


def arguments_object(value: Any, name: str) -> dict[str, Any]:
    """`null` or nothing means no arguments; a string that holds a JSON object means that object."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = _inner_json(value, name)
    if not isinstance(value, dict):
        raise NotACall(f'"arguments" must be a JSON object of names and values, but is {_kind(value)}', name)
    return value


def end_of_brackets(text: str, start: int) -> int | None:
    """The index after the bracket that closes the one at `start`, strings skipped; None if it stays open."""
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


_BRACKET_OR_STRING = re.compile(r'[()\[\]{}]|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)


def _inner_json(text: str, name: str) -> Any:
    """Arguments encoded as JSON inside a string, as OpenAI's interface has them."""
    try:
        value, end = read_value(text, 0)
    except BrokenJson as error:
        raise NotACall(
            f'"arguments" must be a JSON object, but is a string that holds broken JSON: {error.why}', name
        ) from None
    if text[end:].strip():
        raise NotACall('"arguments" must be a JSON object, but is a string with more than JSON in it', name)
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "an object")
