"""Episodes for the tests of rewards and tasks."""

from __future__ import annotations

from typing import Any

from tasks import Episode
from toolcall.types import CallSpan, Outcome, ToolResult


def result(text: str = "84", outcome: Outcome = Outcome.OK, number: int = 0) -> ToolResult:
    call_id = f"call_{number}"
    return ToolResult(call_id, "calculator", outcome, text, CallSpan(call_id, "calculator", outcome, 0, 0, 0))


def episode(*turns: str | tuple[str, ToolResult] | tuple[str, ToolResult, ToolResult], **row: Any) -> Episode:
    """An episode of these turns, each a text or a text with the results that followed it."""
    pairs = [(turn,) if isinstance(turn, str) else turn for turn in turns]
    return Episode(
        row={"question": "12 times 7?", "answer": "84", **row},
        messages=({"role": "user", "content": "12 times 7?"},),
        turns=tuple(str(pair[0]) for pair in pairs),
        results=tuple(tuple(pair[1:]) for pair in pairs),  # pyright: ignore[reportArgumentType]
        stop_reason="answer",
    )
