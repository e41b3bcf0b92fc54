"""JSON calls in `<tool_call>` tags: the syntax of Hermes and Qwen.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12*7"}}
    </tool_call>

Invariant: each `<tool_call>` of a turn gives one call or one failure of its own, whatever its neighbours
hold; arguments are complete or absent. Made by `make_parser("hermes")`, called by `actors.agent_loop`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.results import guarded, shown
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.parsers.tolerant_json import BrokenJson, read_value
from toolcall.types import ParsedTurn, ParseFailure, ToolCall, ToolResult

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = '{"name": "tool", "arguments": {"argument": "value"}}'
NEAR_CHARS = 20
_MARKERS = markers(OPEN, CLOSE)
_CLOSE_NEXT = re.compile(r"\s*" + re.escape(CLOSE))


class _NotACall(ValueError):
    """The text of a call was read, but is not a call. `name`: the tool it names, if it does."""

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.name = name


class HermesParser:
    """Calls as JSON objects; results as tool messages.

    wrap_results: put `<tool_response>` tags around results. False for chat templates that add the tags to
    every tool message themselves (Qwen's).
    """

    stop: tuple[str, ...] = ()
    inline = False

    def __init__(self, wrap_results: bool = True) -> None:
        self.wrap_results = wrap_results

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Words for the system message that offer the tools, for chat templates that ignore tools."""
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            f"You can call tools. Their signatures, one JSON object a line:\n<tools>\n{lines}\n</tools>\n"
            f"To call one, write\n{OPEN}\n{EXAMPLE}\n{CLOSE}\n"
            "and wait for its result."
        )

    def parse(self, text: str, *, truncated: bool = False) -> ParsedTurn:
        return scan(text, _MARKERS, lambda match: _read(text, match, truncated))

    def render_result(self, result: ToolResult) -> str:
        content = guarded(shown(result), "tool_response")
        return f"<tool_response>\n{content}\n</tool_response>" if self.wrap_results else content


def _read(text: str, marker: re.Match[str], truncated: bool) -> tuple[Found, int]:
    """The call that `marker` opens, and the index after it (or after what is left of it)."""
    start = marker.start()
    if marker[0] == CLOSE:
        reason = f"{CLOSE} without {OPEN} before it; write {OPEN}{EXAMPLE}{CLOSE}"
        return ParseFailure("", reason, position=(start, marker.end())), marker.end()
    try:
        call, end = _read_call(text, marker.end(), truncated)
    except _NotACall as error:
        end = _end_of_broken(text, marker.end())
        return ParseFailure("", str(error), error.name, (start, end)), end
    return ToolCall("", *call, position=(start, end)), end


def _read_call(text: str, start: int, truncated: bool) -> tuple[tuple[str, dict[str, Any]], int]:
    try:
        value, end = read_value(text, start)
    except BrokenJson as error:
        raise _NotACall(_where_it_broke(text, start, error, truncated)) from None
    closed = _CLOSE_NEXT.match(text, end)
    if closed is not None:
        return _name_and_arguments(value), closed.end()
    rest = text[end:].strip()
    if truncated and CLOSE.startswith(rest):
        raise _NotACall(f"the call was cut off by the token limit before {CLOSE}, so it did not run")
    if rest:
        broken = BrokenJson(f"{CLOSE} should come after the JSON", text.index(rest, end))
        raise _NotACall(_where_it_broke(text, start, broken, truncated))
    return _name_and_arguments(value), len(text)


def _where_it_broke(text: str, start: int, error: BrokenJson, truncated: bool) -> str:
    if error.cut_off and truncated:
        return "the call was cut off by the token limit before its JSON was complete, so it did not run"
    near = text[error.position : error.position + NEAR_CHARS]
    place = f" (near {near!r})" if near else ""
    return f"the call's JSON is broken at character {error.position - start + 1}: {error.why}{place}"


def _end_of_broken(text: str, start: int) -> int:
    """Where reading goes on after a broken call: after its closing tag, or before the next other tag."""
    following = _MARKERS.search(text, start)
    if following is None:
        return len(text)
    return following.end() if following[0] == CLOSE else following.start()


def _name_and_arguments(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _NotACall(f"a call must be one JSON object, as in {EXAMPLE}, but is {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _NotACall(f'the call does not say which tool: put its name under "name", as in {EXAMPLE}')
    keys = [key for key in ("arguments", "parameters") if key in value]
    if len(keys) == 2:
        raise _NotACall('the call has both "arguments" and "parameters"; keep "arguments"', name)
    others = [key for key in value if key not in ("name", "id", "type", *keys)]
    if others and not keys:
        raise _NotACall(f'put {", ".join(map(repr, others))} under "arguments", as in {EXAMPLE}', name)
    return name, _arguments(value[keys[0]] if keys else None, name)


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """`null` or nothing means no arguments; a string that holds a JSON object means that object."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = _inner_json(value, name)
    if not isinstance(value, dict):
        raise _NotACall(f'"arguments" must be a JSON object of names and values, but is {_kind(value)}', name)
    return value


def _inner_json(text: str, name: str) -> Any:
    """Arguments encoded as JSON inside a string, as OpenAI's interface has them."""
    try:
        value, end = read_value(text, 0)
    except BrokenJson as error:
        raise _NotACall(
            f'"arguments" must be a JSON object, but is a string that holds broken JSON: {error.why}', name
        ) from None
    if text[end:].strip():
        raise _NotACall('"arguments" must be a JSON object, but is a string with more than JSON in it', name)
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "an object")
