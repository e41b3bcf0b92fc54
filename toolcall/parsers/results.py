"""How a result reads inside its tag. Used by every parser's `render_result`.

Invariant: tool text cannot open or close the tag that it stands in, so the model always sees where the
tool's words end.
"""

from __future__ import annotations

import re

from toolcall.types import Outcome, ToolResult


def shown(result: ToolResult) -> str:
    """The result's text; a failure begins with `error:`."""
    return result.text if result.outcome is Outcome.OK else f"error: {result.text}"


def guarded(text: str, tag: str) -> str:
    """`text` with `<tag>` and `</tag>` made harmless by writing their `<` as `&lt;`."""
    return re.sub(rf"<(?=\s*/?\s*{re.escape(tag)}\b)", "&lt;", text, flags=re.IGNORECASE)
