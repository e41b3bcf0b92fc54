"""The base of the syntaxes whose results continue the assistant turn in which the call stands.

Line breaks around the result's tag keep `>` and `<` apart: `><` is one token for many tokenizers, and a
generation that starts between them is off the model's track.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from toolcall.parsers.results import guarded, shown
from toolcall.parsers.thinking import TAGS
from toolcall.types import ToolResult

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class InlineSyntax:
    """Results are always wrapped in `result_tag`: there is no template to do it."""

    name = ""
    inline = True
    markers: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    targets: tuple[tuple[str, str], ...] = ()

    def __init__(self, result_tag: str) -> None:
        self.result_tag = checked_tag(result_tag)

    def for_tools(self, schemas: Sequence[Mapping[str, Any]]) -> Self:
        return self  # its tags say which tools there are

    def render_result(self, result: ToolResult, *, wrapped: bool = True) -> str:
        return self.render_text(shown(result))

    def render_text(self, text: str, *, wrapped: bool = True) -> str:
        return f"\n<{self.result_tag}>{guarded(text, self.result_tag)}</{self.result_tag}>\n"


def checked_tag(tag: str) -> str:
    if not isinstance(tag, str) or not _TAG_NAME.fullmatch(tag) or f"<{tag}>" in TAGS:
        raise ValueError(
            f"{tag!r} cannot be a tag; use letters, digits, _ or -, and no thinking tag such as 'think'"
        )
    return tag
