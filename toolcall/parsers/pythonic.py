"""Calls as a list of Python calls: the syntax of Llama 4 and Llama 3.2 (pythonic), and of LFM2.

    [calculator(expression="12*7"), search(query="cats", top_k=3)]

`<|python_start|>` or `<|tool_call_start|>` may stand before it. Without such a tag, a list is one of calls
only where a line begins with it. Arguments are literals, given by name. Each call of the list is read on
its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import (
    MessageSyntax,
    NotACall,
    end_of_brackets,
    no_call,
    offer_text,
    where_it_broke,
)
from toolcall.parsers.python_literals import read_keywords
from toolcall.parsers.thinking import LINE_START, Found, markers, scan
from toolcall.parsers.tolerant_json import BrokenJson
from toolcall.types import ParsedTurn, ToolCall

OPENERS = ("<|python_start|>", "<|tool_call_start|>")
CLOSERS = ("<|python_end|>", "<|tool_call_end|>")
EXAMPLE = '[tool(argument="value")]'
_CALL = r"[^\W\d][\w.-]*\s*\("
_LIST = rf"\[\s*(?={_CALL})"
_MARKERS = markers(*CLOSERS, pattern=rf"{'|'.join(map(re.escape, OPENERS))}|{LINE_START}{_LIST}")
_NAME = re.compile(r"([^\W\d][\w.-]*)\s*(?=\()")
_AFTER_OPENER = re.compile(rf"\s*{_LIST}")
_NEXT_LIST = re.compile(rf"{LINE_START}{_LIST}|{'|'.join(map(re.escape, (*OPENERS, *CLOSERS)))}")
_SPACE = re.compile(r"\s*")


class PythonicParser(MessageSyntax):
    name = "pythonic"
    markers = (*OPENERS, *CLOSERS)

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        def read(match: re.Match[str]) -> tuple[Sequence[Found], int]:
            return self._read(text, match, truncated)

        return scan(text, _MARKERS, read, thinking=thinking, noise=CLOSERS)

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"[{', '.join(_rendered(call) for call in calls)}]"

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        how = f"To call one or more, answer with nothing but\n{EXAMPLE}\nand wait for the results."
        return offer_text(schemas, how)

    def _read(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        if marker[0] not in OPENERS:
            found, end = _read_list(text, marker.end(), truncated)
            return (found, end) if self._meant_as_calls(found) else ([], marker.end())
        opening = _AFTER_OPENER.match(text, marker.end())
        if opening is None:
            return no_call(marker, f"{marker[0]} must be followed by calls, as in {EXAMPLE}")
        return _read_list(text, opening.end(), truncated)

    def _meant_as_calls(self, found: Sequence[Found]) -> bool:
        """`[see(1)](link)` at the start of a line is prose, if there is no such tool."""
        first = found[0]
        return isinstance(first, ToolCall) or not self.schemas or first.name in self.schemas


def _read_list(text: str, position: int, truncated: bool) -> tuple[list[Found], int]:
    """The calls of the list whose first name is at `position`, and the index after its bracket."""
    found: list[Found] = []
    while name := _NAME.match(text, position):
        item, position = _read_call(text, name, truncated)
        found.append(item)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position = _skip_space(text, position + 1)
    return found, position + 1 if text.startswith("]", position) else position


def _read_call(text: str, name: re.Match[str], truncated: bool) -> tuple[Found, int]:
    start = name.start()
    try:
        arguments, end = read_keywords(text, name.end())
        after = _skip_space(text, end)
        if not re.compile(rf",|\]|$|{_CALL}").match(text, after):
            raise BrokenJson(f"{text[after]!r} stands where , or ] should come", after)
    except BrokenJson as error:
        reason = where_it_broke(text, start, error, truncated, "syntax")
        end = _end_of_broken(text, name.end(), cut=truncated and error.cut_off)
        return NotACall(f"{reason}; write {EXAMPLE}", name[1]).failure(start, end), end
    return ToolCall("", name[1], arguments, (start, end)), end


def _end_of_broken(text: str, bracket: int, cut: bool) -> int:
    """After the call's closing bracket and what stands before the next `,` or `]`; else before the next
    line that begins a list."""
    end = end_of_brackets(text, bracket)
    if end is not None:
        following = re.compile(r"[,\]\n]").search(text, end)
        return len(text) if following is None else following.start()
    following = None if cut else _NEXT_LIST.search(text, bracket)
    return len(text) if following is None else following.start()


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _rendered(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
