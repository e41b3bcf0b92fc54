"""Code blocks that run, answered inside the same assistant turn: the syntax of ReTool.

    <code>
    ```python
    print(12 * 7)
    ```
    </code>
    <interpreter>84</interpreter>

With `tag = ""` the fence alone is the call. A generation ends at `</code>`; without the tag, at a fence that
closes (one that opens has its language behind it).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import no_call
from toolcall.parsers.inline import InlineSyntax, checked_tag
from toolcall.parsers.tag import unclosed
from toolcall.parsers.thinking import LINE_START, Found, markers, scan
from toolcall.types import ParsedTurn, ParseFailure, ToolCall

_FENCE = r"```(?:python|py)[ \t]*\n"
_WHOLE = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
_FENCE_END = re.compile(r"(?m:^)[ \t]*```[ \t]*$", re.MULTILINE)


class FencedPythonParser(InlineSyntax):
    """tool: what runs the code, by its argument `argument`. tag: around the fence; "" for none."""

    name = "fenced_python"

    def __init__(
        self,
        tool: str = "python",
        argument: str = "code",
        tag: str = "code",
        result_tag: str = "interpreter",
    ) -> None:
        super().__init__(result_tag)
        if tag and checked_tag(tag) == result_tag:
            raise ValueError(f"{tag!r} is both the code's tag and the result's; rename one")
        self.tool, self.argument, self.tag = tool, argument, tag
        self.targets = ((tool, argument),)
        self.stop = (f"</{tag}>",) if tag else ("\n```\n",)
        self._markers = markers(f"<{tag}>", f"</{tag}>") if tag else markers(pattern=f"{LINE_START}{_FENCE}")

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        read = self._read_tag if self.tag else self._read_fence
        return scan(text, self._markers, lambda match: read(text, match, truncated), thinking=thinking)

    def offered_as(self, tool: str) -> str:
        return f"<{self.tag}>" if self.tag else "```python"

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(self._rendered(str(call.arguments[self.argument])) for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        tag = self.result_tag
        return (
            f"You can run Python code. Write\n{self._rendered('print(1 + 1)')}\n"
            f"and what it prints follows between <{tag}> and </{tag}>."
        )

    def _rendered(self, code: str) -> str:
        fenced = f"```python\n{code}\n```"
        return f"<{self.tag}>\n{fenced}\n</{self.tag}>" if self.tag else fenced

    def _read_tag(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        start, opening, closing = marker.start(), f"<{self.tag}>", f"</{self.tag}>"
        if marker[0] == closing:
            return no_call(marker, f"{closing} without {opening} before it")
        end = text.find(closing, marker.end())
        following = text.find(opening, marker.end())
        if end < 0 or 0 <= following < end:
            end = len(text) if following < 0 else following
            reason = unclosed(opening, closing, truncated and following < 0)
            return [ParseFailure("", reason, self.tool, (start, end))], end
        body = text[marker.end() : end]
        fenced = _WHOLE.fullmatch(body)
        return [self._call(fenced[1] if fenced else body, start, end + len(closing))], end + len(closing)

    def _read_fence(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        start = marker.end() - len(marker[0].lstrip())
        closing = _FENCE_END.search(text, marker.end())
        following = self._markers.search(text, marker.end())
        if closing is None or (following is not None and following.start() < closing.start()):
            end = len(text) if following is None else following.start()
            reason = unclosed("```python", "```", truncated and following is None)
            return [ParseFailure("", reason, self.tool, (start, end))], end
        return [self._call(text[marker.end() : closing.start()], start, closing.end())], closing.end()

    def _call(self, code: str, start: int, end: int) -> Found:
        code = code.strip("\n")
        if not code.strip():
            return ParseFailure("", "the code block is empty", self.tool, (start, end))
        return ToolCall("", self.tool, {self.argument: code}, (start, end))
