"""Thinking sections, and the walk over a turn that every parser shares.

Invariant: nothing inside `<think>…</think>` is a call or an answer. A section may stay open to the end of
the turn, and a turn may begin inside one (templates that write `<think>` themselves): a first `</think>`
without its opener makes everything before it thinking.
Called by the parsers, and by `tasks.rules` for answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from toolcall.types import ParsedTurn, ParseFailure, ToolCall

OPEN, CLOSE = "<think>", "</think>"
_THINKING_ONLY = re.compile(f"{OPEN}|{CLOSE}")

Found = ToolCall | ParseFailure
Reader = Callable[[re.Match[str]], tuple[Found, int]]  # a marker → what it starts, and where that ends


def markers(*literals: str) -> re.Pattern[str]:
    """A pattern for `scan` that stops at these strings and at thinking tags."""
    return re.compile("|".join(re.escape(literal) for literal in (OPEN, CLOSE, *literals)))


def scan(text: str, pattern: re.Pattern[str], read: Reader) -> ParsedTurn:
    """Walk over `text`; `read` is called at each marker outside thinking. Calls are numbered in order."""
    found: list[Found] = []
    pieces: list[str] = []
    position, thinking_seen = 0, False
    while match := pattern.search(text, position):
        pieces.append(text[position : match.start()])
        if match[0] == OPEN:
            end = text.find(CLOSE, match.end())
            position = len(text) if end < 0 else end + len(CLOSE)
            thinking_seen = True
        elif match[0] == CLOSE:
            if not thinking_seen:
                found.clear()
                pieces.clear()
            position, thinking_seen = match.end(), True
        else:
            item, position = read(match)
            found.append(item)
    pieces.append(text[position:])
    calls = tuple(replace(item, id=f"call_{number}") for number, item in enumerate(found))
    return ParsedTurn(calls, "".join(pieces).strip())


def without_thinking(text: str) -> str:
    """`text` with its thinking sections removed."""

    def no_markers(match: re.Match[str]) -> tuple[Found, int]:
        raise AssertionError(f"{match[0]!r} is not a thinking tag")

    return scan(text, _THINKING_ONLY, no_markers).text
