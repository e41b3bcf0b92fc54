"""What a tool returned → text for the model, and cutting text to a budget.

Invariant: a value is shown in a stated form or refused with a sentence, never shown as a Python repr by
accident; a cut text says how much is missing and fits its budget. Called by the executor and, with a
tokenizer's count as `measure`, by the agent loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from toolcall.errors import ToolError

NOTHING = "(the tool returned nothing)"
MOST_CHARS_PER_UNIT = 32  # a text with more for each unit of its budget is too long, measured or not


def to_text(value: Any) -> str:
    """Text as it is; numbers, booleans, dicts, lists and pydantic models as JSON; None as a remark.

    Raises ToolError for anything else (bytes, images, objects), naming its type.
    """
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")  # half characters cannot be tokenized
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if not isinstance(value, bool | int | float | dict | list | tuple):
        raise ToolError(f"the tool returned {_kind(value)}, which cannot be shown as text")
    try:
        return to_text(json.dumps(value, ensure_ascii=False, default=_refuse))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool's {_kind(value)} cannot be shown as JSON ({error})") from error


def cut_to_budget(text: str, budget: int, measure: Callable[[str], int] = len, keep: str = "head") -> str:
    """`text`, or as much of its head, tail or both ends as measures at most `budget` with a note of what
    was left out.

    measure: size of a text; need not be additive, only roughly growing with length, at most one for each
    byte. The result may be a hundredth shorter than it could be. If the budget is too small even for the
    note, the note is left away.
    """
    may_fit = len(text) <= MOST_CHARS_PER_UNIT * budget
    if may_fit and (len(text.encode()) <= budget or measure(text) <= budget):
        return text

    def noted(kept: int) -> str:
        return shorten(text, kept, keep)

    def bare(kept: int) -> str:
        return _ends(text, kept, keep, "")

    build = noted if measure(noted(0)) <= budget else bare
    low, high = 0, min(len(text), max(budget, 1))  # build(low) fits as far as we know
    while high < len(text) and measure(build(high)) <= budget:
        low, high = high, min(2 * high, len(text))
    while high - low > 1 + low // 100:
        middle = (low + high) // 2
        if measure(build(middle)) <= budget:
            low = middle
        else:
            high = middle
    return build(low)


def shorten(text: str, kept: int, keep: str = "head") -> str:
    """`kept` characters of `text` and a note of how many were left out; all of it if none were."""
    left_out = len(text) - kept
    if left_out <= 0:
        return text
    return _ends(text, kept, keep, f"[cut: {left_out} of {len(text)} characters left out]")


def _ends(text: str, kept: int, keep: str, note: str) -> str:
    tail = {"head": 0, "tail": kept, "both": kept // 2}[keep]
    parts = (text[: kept - tail], note, text[len(text) - tail :])
    return "\n".join(part for part in parts if part) if note else "".join(parts)


def _refuse(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise ToolError(f"the tool returned {_kind(value)} inside its result, which cannot be shown as text")


def _kind(value: Any) -> str:
    size = f" of {len(value)} bytes" if isinstance(value, bytes | bytearray) else ""
    return f"a value of type {type(value).__name__}{size}"
