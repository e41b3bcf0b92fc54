"""From what the `renderers` package parses at token level to our calls and failures.

The package finds each call between its control tokens, so that a call spelled out in ordinary text stays
text. Three of its answers are not ours, and are mended here:
- a call inside a thinking section that is never closed counts as a call there; here it is none (CASES C2);
- JSON is read strictly, and "parameters" as no arguments at all; here as by the text parsers (C4, C6);
- a turn that its JSON reader cannot survive raises; here it is a failure that the model can read.

Used by `actors.typed_renderer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolcall.parsers.calls import NotACall, arguments_object, call_from, cut_off, name_and_arguments
from toolcall.parsers.thinking import SECTIONS, Found, tags_in, with_ids
from toolcall.parsers.tolerant_json import BrokenJson, read_value
from toolcall.types import ParsedTurn, ParseFailure, ToolCall

Span = tuple[int, int]


def read_response(
    respond: Callable[[], Any],
    ids: Sequence[int],
    text: Callable[[Sequence[int]], str],
    *,
    truncated: bool,
    thinking: bool,
) -> ParsedTurn:
    """The turn as `respond()`, the package's parse of `ids`, has it. Positions are characters of `text`."""
    whole = text(ids)
    try:
        response = respond()
    except Exception as error:  # noqa: BLE001 - whatever the package trips over is the model's text: data
        reason = f"the turn could not be read ({type(error).__name__}: {error}); write plain, smaller calls"
        return ParsedTurn((ParseFailure("call_0", reason, position=(0, len(whole))),), whole, thinking)
    spans = _positions(response.tool_calls, ids, whole, text)
    kept = _outside_thinking(whole, spans, thinking)
    found = [_read(response.tool_calls[i], spans[i], truncated) for i in kept]
    return ParsedTurn(with_ids(found), response.content, thinking)


def _positions(
    calls: Sequence[Any], ids: Sequence[int], whole: str, text: Callable[[Sequence[int]], str]
) -> list[Span]:
    """Where each call stands in the text, in order; by its own words where the package has no tokens."""
    spans: list[Span] = []
    after = 0
    for call in calls:
        if call.token_span is not None:
            start, end = (len(text(ids[:token])) for token in call.token_span)
        else:
            start = max(after, whole.find(call.raw, after))
            end = start + len(call.raw)
        start = max(after, start)
        after = min(len(whole), max(end, start))
        spans.append((start, after))
    return spans


def _outside_thinking(whole: str, spans: Sequence[Span], thinking: bool) -> list[int]:
    """The calls that no thinking section holds, by the tags that stand between calls."""
    kept: list[int] = []
    is_open = section_seen = thinking
    after = 0
    for number, (start, end) in enumerate([*spans, (len(whole), len(whole))]):
        for tag in tags_in(whole[after:start]):
            is_open = tag in SECTIONS
            if not is_open and not section_seen:
                kept.clear()
            section_seen = True
        if not is_open and number < len(spans):
            kept.append(number)
        after = end
    return kept


def _read(call: Any, span: Span, truncated: bool) -> Found:
    status = str(call.status)
    try:
        if status == "unclosed_block":
            raise NotACall(cut_off("its end") if truncated else "the call is not closed, so it did not run")
        if (own := _own_json(call)) is not None:
            return call_from(own, *span)
        if not call.name:
            name_and_arguments({"arguments": {}})  # says how a call names its tool
        if status == "malformed_structure":
            raise NotACall(f"the call's structure is broken: {call.raw[:200]!r}", call.name)
        return ToolCall(call.id or "", call.name, arguments_object(call.arguments, call.name), span)
    except NotACall as error:
        return error.failure(*span)


def _own_json(call: Any) -> Any:
    """The call's text as one JSON object that names its tool, if that is how the format writes calls."""
    if not call.raw.lstrip().startswith("{"):
        return None
    try:
        value, end = read_value(call.raw, 0)
    except BrokenJson as error:
        if call.name:
            return None
        raise NotACall(f"the call's JSON is broken at character {error.position + 1}: {error.why}") from None
    named = isinstance(value, dict) and call.name in (None, "", value.get("name"))
    return value if named and not call.raw[end:].strip() else None
