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


def cut_to_budget(
    text: str, budget: int, measure: Callable[[str], int] = len, unit: str = "characters"
) -> str:
    """The longest beginning of `text` that, with a note of what was left out, measures at most `budget`.

    measure: size of a text in `unit`; need not be additive, only roughly growing with length. If the
    budget is too small even for the note, the note is left away.
    """
    total = measure(text)
    if total <= budget:
        return text

    def shortened(kept: int) -> str:
        note = f"\n[cut: {total - min(measure(text[:kept]), total)} of {total} {unit} left out]"
        return text[:kept] + note

    build = shortened if measure(shortened(0)) <= budget else lambda kept: text[:kept]
    low, high = 0, len(text)  # build(low) fits as far as we know, build(high) does not
    while high - low > 1:
        middle = (low + high) // 2
        if measure(build(middle)) <= budget:
            low = middle
        else:
            high = middle
    return build(low)


def _refuse(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise ToolError(f"the tool returned {_kind(value)} inside its result, which cannot be shown as text")


def _kind(value: Any) -> str:
    size = f" of {len(value)} bytes" if isinstance(value, bytes | bytearray) else ""
    return f"a value of type {type(value).__name__}{size}"
