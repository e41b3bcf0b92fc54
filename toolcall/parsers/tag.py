"""Calls as tags with the argument as plain text, answered inside the same assistant turn.

    <calc>12*7</calc>
    <result>84</result>

Small models write this far more reliably than JSON. Invariant: each opening tag of a turn gives one call
or one failure; only a closed tag is a call. Made by `make_parser("tag", tags=…)`, called by
`actors.agent_loop`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from toolcall.parsers.results import guarded, shown
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.types import ParsedTurn, ParseFailure, ToolCall, ToolResult

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class TagParser:
    """tags: tag name → (tool name, the tool's one argument). result_tag: the tag around results."""

    inline = True

    def __init__(self, tags: Mapping[str, tuple[str, str]], result_tag: str = "result") -> None:
        if not tags:
            raise ValueError(
                'the tag syntax needs at least one tag, as in tags={"calc": ("calculator", "expression")}'
            )
        for tag in (*tags, result_tag):
            if not _TAG_NAME.fullmatch(tag) or tag == "think":
                raise ValueError(f"{tag!r} cannot be a tag; use letters, digits, _ or -, and not 'think'")
        if result_tag in tags:
            raise ValueError(f"{result_tag!r} is both a call's tag and the result's; rename one")
        self.tags = {tag: (tool, argument) for tag, (tool, argument) in tags.items()}
        self.result_tag = result_tag
        self.offered_as = {tool: tag for tag, (tool, _) in self.tags.items()}  # how a prompt names each tool
        self.stop = tuple(f"</{tag}>" for tag in self.tags)
        self._markers = markers(*(f"<{tag}>" for tag in self.tags), *self.stop)

    def parse(self, text: str, *, truncated: bool = False) -> ParsedTurn:
        return scan(text, self._markers, lambda match: self._read(text, match, truncated))

    def render_result(self, result: ToolResult) -> str:
        """Line breaks around the tags keep `>` and `<` apart: `><` is one token for many tokenizers, and a
        generation that starts between them is off the model's track."""
        return f"\n<{self.result_tag}>{guarded(shown(result), self.result_tag)}</{self.result_tag}>\n"

    def _read(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Found, int]:
        start, tag = marker.start(), marker[0].strip("</>")
        if marker[0].startswith("</"):
            reason = f"</{tag}> without <{tag}> before it"
            return ParseFailure("", reason, position=(start, marker.end())), marker.end()
        tool, argument = self.tags[tag]
        following = self._markers.search(text, marker.end())
        if following is None or following[0] != f"</{tag}>":
            end = following.start() if following else len(text)
            return ParseFailure("", _unclosed(tag, truncated and following is None), tool, (start, end)), end
        value, end = text[marker.end() : following.start()].strip(), following.end()
        if not value:
            return ParseFailure("", f"<{tag}> is empty; put the {argument} in it", tool, (start, end)), end
        return ToolCall("", tool, {argument: value}, (start, end)), end


def _unclosed(tag: str, cut_off: bool) -> str:
    if cut_off:
        return f"the call was cut off by the token limit before </{tag}>, so it did not run"
    return f"<{tag}> is not closed by </{tag}>, so it did not run"
