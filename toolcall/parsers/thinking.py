"""Thinking sections, and the walk over a turn that every parser shares.

Invariant: nothing inside a thinking section is a call or an answer. A section may stay open to the end of
the turn. A turn may begin inside one (templates that write `<think>` themselves): whoever knows says so by
`thinking=True`; without that, a first `</think>` that has no opener makes everything before it thinking.
Called by the parsers, and by `tasks.rules` for answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from toolcall.types import ParsedTurn, ParseFailure, ToolCall

SECTIONS = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM and most others
    "<thinking>": "</thinking>",  # prompts that ask for it
    "[THINK]": "[/THINK]",  # Mistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<mm:think>": "</mm:think>",  # MiniMax
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
}
TAGS = (*SECTIONS, *SECTIONS.values())
_ANY_TAG = "|".join(map(re.escape, TAGS))
_CLOSER = re.compile("|".join(map(re.escape, SECTIONS.values())))
_THINKING_ONLY = re.compile(_ANY_TAG)
MAX_CALLS = 128  # of a turn
_TOO_MANY = f"a turn may hold {MAX_CALLS} calls; this one and those after it did not run"
_MODEL_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)

LINE_START = "(?:(?m:^)|" + "|".join(f"(?<={re.escape(tag)})" for tag in SECTIONS.values()) + ")[ \t]*"
"""Where a call without an opening tag may begin: a line, or what follows a thinking section."""

Found = ToolCall | ParseFailure
Reader = Callable[[re.Match[str]], tuple[Sequence[Found], int]]
"""From a marker to what it starts, and where that ends. Nothing found: the text is ordinary and kept."""


def markers(*literals: str, pattern: str = "") -> re.Pattern[str]:
    """A pattern for `scan` that stops at these strings, at `pattern`, and at thinking tags."""
    choices = [_ANY_TAG, *map(re.escape, literals), *([pattern] if pattern else [])]
    return re.compile("|".join(choices))


def numbered(number: int) -> str:
    return f"call_{number}"


def scan(
    text: str,
    pattern: re.Pattern[str],
    read: Reader,
    *,
    thinking: bool = False,
    noise: Sequence[str] = (),
    make_id: Callable[[int], str] = numbered,
) -> ParsedTurn:
    """Walk over `text`; `read` is called at each marker outside thinking. Calls are numbered in order.

    `noise`: markers that say nothing by themselves, such as the brackets around a list of calls.
    """
    found: list[Found] = []
    pieces: list[str] = []
    position = _end_of_section(_CLOSER, text, 0) if thinking else 0
    section_seen = thinking
    while match := pattern.search(text, position):
        pieces.append(text[position : match.start()])
        if match[0] in SECTIONS:
            closer = re.compile(re.escape(SECTIONS[match[0]]))
            position, section_seen = _end_of_section(closer, text, match.end()), True
        elif match[0] in TAGS:
            if not section_seen:
                found.clear()
                pieces.clear()
            position, section_seen = match.end(), True
        elif match[0] in noise:
            position = match.end()
        else:
            items, end = read(match)
            position = max(end, match.end(), match.start() + 1)
            found += items
            if not items:
                pieces.append(text[match.start() : position])
            if len(found) > MAX_CALLS and (section_seen or not _CLOSER.search(text, position)):
                position = len(text)
    pieces.append(text[position:])
    return ParsedTurn(with_ids(found, make_id), "".join(pieces).strip(), thinking)


def without_thinking(text: str, *, thinking: bool = False) -> str:
    """`text` with its thinking sections removed. `thinking`: it begins inside one."""

    def no_markers(match: re.Match[str]) -> tuple[Sequence[Found], int]:
        raise AssertionError(f"{match[0]!r} is not a thinking tag")

    return scan(text, _THINKING_ONLY, no_markers, thinking=thinking).text


def tags_in(text: str) -> list[str]:
    """The thinking tags of `text`, in order."""
    return _THINKING_ONLY.findall(text)


def ends_in_opener(text: str) -> bool:
    """Is the last that `text` says the start of a thinking section?"""
    return text.rstrip().endswith(tuple(SECTIONS))


def _end_of_section(closer: re.Pattern[str], text: str, start: int) -> int:
    match = closer.search(text, start)
    return len(text) if match is None else match.end()


def with_ids(found: Sequence[Found], make_id: Callable[[int], str] = numbered) -> tuple[Found, ...]:
    """An id that the model wrote itself is kept if it names one call only; else the call is numbered. Of more
    than `MAX_CALLS`, as a model repeats itself, the rest is one failure."""
    if len(found) > MAX_CALLS:
        rest = ParseFailure("", _TOO_MANY, position=found[MAX_CALLS].position)
        found = [*found[:MAX_CALLS], rest]
    written = [item.id for item in found]
    return tuple(
        item
        if written.count(item.id) == 1 and _MODEL_ID.fullmatch(item.id)
        else replace(item, id=make_id(number))
        for number, item in enumerate(found)
    )
