"""Mistral's calls, older and newer form:

    [TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "12*7"}, "id": "9f3kq7xzb"}]
    [TOOL_CALLS]calculator[ARGS]{"expression": "12*7"}

The newer form may carry `[CALL_ID]` and an id before `[ARGS]`, and opens each call by `[TOOL_CALLS]`.
Ids are nine letters or digits, as Mistral's chat templates demand; an id that the model wrote is kept, since
the template shows it beside the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolcall.parsers.calls import (
    EXAMPLE,
    MessageSyntax,
    NotACall,
    arguments_object,
    as_json,
    call_from,
    call_json,
    cut_off,
    end_of_brackets,
    next_marker,
    offer_text,
    one_call,
    read_json,
)
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.types import ParsedTurn, ToolCall

OPEN = "[TOOL_CALLS]"
_MARKERS = markers(OPEN)
_LIST = re.compile(r"\s*\[\s*(?=[{\]])")
_OBJECT = re.compile(r"\s*,?\s*(?=\{)")
_LIST_END = re.compile(r"\s*,?\s*\]")
_NAMED = re.compile(
    r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)", re.ASCII
)
_CUT_NAME = re.compile(r"\s*\[?[\w.-]*\s*(?:\[[A-Z_]*\]?\s*\w*\s*){0,2}", re.ASCII)
_UNNAMED = re.compile(r"\s*(?=\{)")


class MistralParser(MessageSyntax):
    """form: how worked examples are written, `list` (older) or `named`; both are read."""

    name = "mistral"
    markers = (OPEN, "[ARGS]", "[CALL_ID]")

    def __init__(self, schemas: Sequence[Mapping[str, Any]] = (), form: str = "named") -> None:
        super().__init__(schemas)
        if form not in ("named", "list"):
            raise ValueError(f"form = {form!r}; choose one of: named, list")
        self.form = form

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        def read(match: re.Match[str]) -> tuple[Sequence[Found], int]:
            return _read(text, match, truncated)

        return scan(text, _MARKERS, read, thinking=thinking, make_id=_nine_characters)

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        if self.form == "list":
            return f"{OPEN} [{', '.join(call_json(call) for call in calls)}]"
        return "".join(f"{OPEN}{call.name}[ARGS]{as_json(call.arguments)}" for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        example = f"{OPEN} [{EXAMPLE}]" if self.form == "list" else f'{OPEN}tool[ARGS]{{"argument": "value"}}'
        return offer_text(schemas, f"To call one, write\n{example}\nand wait for its result.")


def _nine_characters(number: int) -> str:
    return f"call{number:05d}"


def _read(text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
    if opened := _LIST.match(text, marker.end()):
        return _read_list(text, marker, opened.end(), truncated)
    return one_call(
        marker,
        lambda: _read_named(text, marker, truncated),
        lambda: next_marker(_MARKERS, text, marker.end()),
    )


def _read_named(text: str, marker: re.Match[str], truncated: bool) -> ToolCall:
    start = marker.start()
    named = _NAMED.match(text, marker.end())
    if named is None:
        if unnamed := _UNNAMED.match(text, marker.end()):
            value, end = read_json(text, unnamed.end(), truncated)
            return _with_own_id(call_from(value, start, end), value)
        if truncated and _CUT_NAME.fullmatch(text, marker.end()):
            raise NotACall(cut_off())
        raise NotACall(f'after {OPEN} comes [{EXAMPLE}] or name[ARGS]{{"argument": "value"}}')
    value, end = read_json(text, named.end(), truncated, named[1])
    return ToolCall(named[2] or "", named[1], arguments_object(value, named[1]), (start, end))


def _read_list(text: str, marker: re.Match[str], position: int, truncated: bool) -> tuple[list[Found], int]:
    """The objects of a list, each on its own."""
    found: list[Found] = []
    while opening := _OBJECT.match(text, position):
        start = opening.end()
        item, position = _read_object(text, start, truncated)
        found.append(item)
    closing = _LIST_END.match(text, position)
    end = closing.end() if closing else position
    if not found:
        found.append(NotACall(f"{OPEN} has no call; write {OPEN} [{EXAMPLE}]").failure(marker.start(), end))
    return found, end


def _read_object(text: str, start: int, truncated: bool) -> tuple[Found, int]:
    try:
        value, end = read_json(text, start, truncated)
        return _with_own_id(call_from(value, start, end), value), end
    except NotACall as error:
        end = error.end or end_of_brackets(text, start)
        if end is None:
            end = next_marker(_MARKERS, text, start)
        return error.failure(start, end), end


def _with_own_id(call: ToolCall, value: Mapping[str, Any]) -> ToolCall:
    own = value.get("id")
    return replace(call, id=own) if isinstance(own, str) else call
