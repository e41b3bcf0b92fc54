"""DeepSeek's calls, of V3 and R1, and of V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator
    ```json
    {"expression": "12*7"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "12*7"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>                                   (without the line break)

Both are read; each call between its own pair of tokens, so that no call hides another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import (
    MessageSyntax,
    NotACall,
    arguments_object,
    as_json,
    cut_off,
    next_marker,
    no_call,
    offer_text,
    one_call,
    read_json,
)
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.types import ParsedTurn, ToolCall

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
EXAMPLE = f'{CALLS_OPEN}{OPEN}tool{SEPARATOR}{{"argument": "value"}}{CLOSE}{CALLS_CLOSE}'
_MARKERS = markers(CALLS_OPEN, CALLS_CLOSE, OPEN, CLOSE)
_HEAD = re.compile(r"\s*([^<>\s{]+)\s*" + re.escape(SEPARATOR) + r"\s*")
_FENCED = re.compile(r"([^<>\s{`]+)\s*(?:```(?:json)?)?\s*(?=\{)")
_CUT_NAME = re.compile(r"[^<>\s{`]*\s*`{0,3}(?:j|js|jso|json)?\s*")
_CLOSE_NEXT = re.compile(r"\s*(?:```)?\s*(?:" + re.escape(CLOSE) + ")")


class DeepSeekParser(MessageSyntax):
    """version: how worked examples are written, `v3` (and R1) or `v3.1`; both are read."""

    name = "deepseek"
    markers = (CALLS_OPEN, CALLS_CLOSE, OPEN, SEPARATOR, CLOSE)

    def __init__(self, schemas: Sequence[Mapping[str, Any]] = (), version: str = "v3.1") -> None:
        super().__init__(schemas)
        if version not in ("v3", "v3.1"):
            raise ValueError(f"version = {version!r}; choose one of: v3, v3.1")
        self.version = version

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        def read(match: re.Match[str]) -> tuple[Sequence[Found], int]:
            return _read(text, match, truncated)

        return scan(text, _MARKERS, read, thinking=thinking, noise=(CALLS_OPEN, CALLS_CLOSE))

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        between = "\n" if self.version == "v3" else ""
        return CALLS_OPEN + between.join(self._rendered(call) for call in calls) + CALLS_CLOSE

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        example = self.render_calls([ToolCall("", "tool", {"argument": "value"})])
        return offer_text(schemas, f"To call one, write\n{example}\nand wait for its result.")

    def _rendered(self, call: ToolCall) -> str:
        if self.version == "v3":
            body = f"function{SEPARATOR}{call.name}\n```json\n{as_json(call.arguments)}\n```"
        else:
            body = f"{call.name}{SEPARATOR}{as_json(call.arguments)}"
        return f"{OPEN}{body}{CLOSE}"


def _read(text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
    if marker[0] == CLOSE:
        return no_call(marker, f"{CLOSE} without {OPEN} before it; write {EXAMPLE}")
    return one_call(
        marker,
        lambda: _read_call(text, marker, truncated),
        lambda: next_marker(_MARKERS, text, marker.end(), CLOSE),
    )


def _read_call(text: str, marker: re.Match[str], truncated: bool) -> ToolCall:
    head = _HEAD.match(text, marker.end())
    if head is None:
        if truncated and not _MARKERS.search(text, marker.end()):
            raise NotACall(cut_off(CLOSE))
        raise NotACall(f"a tool's name and {SEPARATOR} should come after {OPEN}; write {EXAMPLE}")
    name, position = head[1], head.end()
    if not text.startswith("{", position) and (fenced := _FENCED.match(text, position)):
        name, position = fenced[1], fenced.end()
    elif truncated and _CUT_NAME.fullmatch(text, position):
        raise NotACall(cut_off(CLOSE))
    value, end = read_json(text, position, truncated, name)
    closed = _CLOSE_NEXT.match(text, end)
    if closed is None:
        rest = text[end:].strip().removeprefix("```").strip()
        if truncated and (CLOSE.startswith(rest) or "```".startswith(rest)):
            raise NotACall(cut_off(CLOSE), name)
        if rest and not rest.startswith(CALLS_CLOSE):
            raise NotACall(f"{CLOSE} should come after the JSON (near {rest[:20]!r})", name)
        end = len(text) if not rest else text.index(CALLS_CLOSE, end)
    else:
        end = closed.end()
    try:
        return ToolCall("", name, arguments_object(value, name), (marker.start(), end))
    except NotACall as error:
        raise NotACall(str(error), name, end) from None
