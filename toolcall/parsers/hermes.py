"""JSON calls in `<tool_call>` tags: the syntax of Hermes and of Qwen 2.5 and 3.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12*7"}}
    </tool_call>

Invariant: each `<tool_call>` of a turn gives one call or one failure of its own, whatever its neighbours
hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import (
    EXAMPLE,
    MessageSyntax,
    NotACall,
    call_from,
    call_json,
    cut_off,
    next_marker,
    no_call,
    offer_text,
    one_call,
    read_json,
    where_it_broke,
)
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.parsers.tolerant_json import BrokenJson
from toolcall.types import ParsedTurn, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = markers(OPEN, CLOSE)
_CLOSE_NEXT = re.compile(r"\s*" + re.escape(CLOSE))


class HermesParser(MessageSyntax):
    name = "hermes"
    markers = (OPEN, CLOSE)
    result_tag = "tool_response"

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        return scan(text, _MARKERS, lambda match: _read(text, match, truncated), thinking=thinking)

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{call_json(call)}\n{CLOSE}" for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        how = f"To call one, write\n{OPEN}\n{EXAMPLE}\n{CLOSE}\nand wait for its result."
        return offer_text(schemas, how)


def _read(text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
    """The call that `marker` opens, and the index after it (or after what is left of it)."""
    start, body = marker.span()
    if marker[0] == CLOSE:
        return no_call(marker, f"{CLOSE} without {OPEN} before it; write {OPEN}{EXAMPLE}{CLOSE}")
    return one_call(
        marker,
        lambda: _read_call(text, start, body, truncated),
        lambda: next_marker(_MARKERS, text, body, CLOSE),
    )


def _read_call(text: str, start: int, body: int, truncated: bool) -> ToolCall:
    value, end = read_json(text, body, truncated)
    if closed := _CLOSE_NEXT.match(text, end):
        return call_from(value, start, closed.end())
    rest = text[end:].strip()
    if truncated and CLOSE.startswith(rest):
        raise NotACall(cut_off(CLOSE))
    if rest:
        broken = BrokenJson(f"{CLOSE} should come after the JSON", text.index(rest, end))
        raise NotACall(where_it_broke(text, body, broken, truncated))
    return call_from(value, start, len(text))
