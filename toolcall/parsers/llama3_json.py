"""Bare JSON calls: the syntax of Llama 3.1 to 3.3, and of Llama 4's own template.

    {"name": "calculator", "parameters": {"expression": "12*7"}}

`<|python_tag|>` or `<|python_start|>` may stand before it. Several calls follow each other on lines of their
own, after `;`, or as a list. With no tag around it, JSON is a call only where a line begins with it and it
has the shape of a call; other JSON is the model's answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import (
    MessageSyntax,
    NotACall,
    call_from,
    call_json,
    no_call,
    offer_text,
    where_it_broke,
)
from toolcall.parsers.thinking import LINE_START, Found, markers, scan
from toolcall.parsers.tolerant_json import BrokenJson, read_value
from toolcall.types import ParsedTurn, ParseFailure, ToolCall

OPENERS, CLOSER = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"
EXAMPLE = '{"name": "tool", "parameters": {"argument": "value"}}'
_FIRST_KEY = r"""\{\s*["'](?:name|function|type|parameters|arguments)["']\s*:"""
_MARKERS = markers(*OPENERS, CLOSER, pattern=rf"{LINE_START}(?:\[\s*)?(?={_FIRST_KEY})")
_NEXT = re.compile(r"\s*(?:<\|python_tag\|>\s*)?[;,\[]?\s*(?=\{)")
_RESUME = re.compile(rf"(?:(?m:^)|;)[ \t]*(?={_FIRST_KEY})")
_LIST_END = re.compile(r"\s*\]")


class Llama3JsonParser(MessageSyntax):
    name = "llama3_json"
    markers = (*OPENERS, CLOSER)

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        def read(match: re.Match[str]) -> tuple[Sequence[Found], int]:
            return self._read(text, match, truncated)

        return scan(text, _MARKERS, read, thinking=thinking, noise=(CLOSER,))

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(call_json(call, "parameters") for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        how = f"To call one, answer with nothing but\n{EXAMPLE}\nand wait for its result."
        return offer_text(schemas, how)

    def _read(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        """All calls that follow each other from `marker` on."""
        tagged = marker[0] in OPENERS
        found: list[Found] = []
        position = marker.end()
        while opening := _NEXT.match(text, position):
            item, end = self._one(text, opening.end(), truncated, tagged or bool(found))
            if item is None:
                break
            found.append(item)
            position = end
        if tagged and not found:
            return no_call(marker, f"{marker[0]} must be followed by a call, as in {EXAMPLE}")
        listed = bool(found) and "[" in text[marker.start() : found[0].position[0]]
        closing = _LIST_END.match(text, position) if listed else None
        return found, closing.end() if closing else position

    def _one(self, text: str, start: int, truncated: bool, marked: bool) -> tuple[Found | None, int]:
        """The call whose brace is at `start`, and where reading goes on; None if it is not meant as one."""
        try:
            value, end = read_value(text, start)
        except BrokenJson as error:
            if not re.compile(_FIRST_KEY).match(text, start):
                return None, start
            reason = where_it_broke(text, start, error, truncated)
            following = None if truncated and error.cut_off else _RESUME.search(text, start + 1)
            end = len(text) if following is None else following.start()
            return ParseFailure("", reason, position=(start, end)), end
        value = _unwrapped(value)
        if not self._is_call(value, marked):
            return None, start
        try:
            return call_from(value, start, end, EXAMPLE), end
        except NotACall as error:
            return error.failure(start, end), end

    def _is_call(self, value: Any, marked: bool) -> bool:
        """`{"name": "Ada"}` may be an answer; with arguments, or with a tool's name, it is a call."""
        if not isinstance(value, dict):
            return False
        arguments = "parameters" in value or "arguments" in value
        return arguments or value.get("name") in self.schemas or (marked and "name" in value)


def _unwrapped(value: Any) -> Any:
    """OpenAI's `{"type": "function", "function": {…}}`, and `"function"` in place of `"name"`."""
    if not isinstance(value, dict) or "function" not in value or "name" in value:
        return value
    if isinstance(value["function"], dict):
        return value["function"]
    return {"name" if key == "function" else key: inner for key, inner in value.items()}
