"""Calls as tags with the argument as plain text, answered inside the same assistant turn.

    <calc>12*7</calc>
    <result>84</result>

The syntax of Search-R1 (`<search>`, answered by `<information>`). Small models write this far more reliably
than JSON. Invariant: each opening tag of a turn gives one call or one failure; only a closed tag is a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import cut_off, no_call
from toolcall.parsers.inline import InlineSyntax, checked_tag
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.types import ParsedTurn, ParseFailure, ToolCall

EXAMPLE = 'tags = {calc = ["calculator", "expression"]}'


class TagParser(InlineSyntax):
    """tags: tag name → (tool name, the tool's one argument). result_tag: the tag around results."""

    name = "tag"

    def __init__(self, tags: Mapping[str, Sequence[str]], result_tag: str = "result") -> None:
        super().__init__(result_tag)
        if not tags:
            raise ValueError(f"the tag syntax needs at least one tag, as in {EXAMPLE}")
        for tag, target in tags.items():
            if isinstance(target, str) or len(target) != 2:
                raise ValueError(f"tag {tag!r} must be given a tool and its argument, as in {EXAMPLE}")
            checked_tag(tag)
        if result_tag in tags:
            raise ValueError(f"{result_tag!r} is both a call's tag and the result's; rename one")
        self.tags = {tag: (tool, argument) for tag, (tool, argument) in tags.items()}
        self.stop = tuple(f"</{tag}>" for tag in self.tags)
        self.targets = tuple(self.tags.values())
        self._markers = markers(*(f"<{tag}>" for tag in self.tags), *self.stop)

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        return scan(text, self._markers, lambda match: self._read(text, match, truncated), thinking=thinking)

    def offered_as(self, tool: str) -> str:
        """How a prompt names the tool: by its tag."""
        return f"<{self._tag_of(tool)[0]}>"

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(self._rendered(call) for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        lines = [self._offer_line(schema["function"]) for schema in schemas]
        tag = self.result_tag
        return "\n".join(["You can call tools:", *lines, f"The result follows between <{tag}> and </{tag}>."])

    def _offer_line(self, function: Mapping[str, Any]) -> str:
        tag, argument = self._tag_of(function["name"])
        return f"<{tag}>{argument}</{tag}>: {function.get('description', '')}".rstrip(": ")

    def _tag_of(self, tool: str) -> tuple[str, str]:
        for tag, (name, argument) in self.tags.items():
            if name == tool:
                return tag, argument
        raise ValueError(f"no tag is given for tool {tool!r}; add one to tags")

    def _rendered(self, call: ToolCall) -> str:
        tag, argument = self._tag_of(call.name)
        if list(call.arguments) != [argument]:
            raise ValueError(
                f"<{tag}> holds {argument!r} alone, not {', '.join(call.arguments) or 'nothing'}"
            )
        return f"<{tag}>{call.arguments[argument]}</{tag}>"

    def _read(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        start, tag = marker.start(), marker[0].strip("</>")
        if marker[0].startswith("</"):
            return no_call(marker, f"</{tag}> without <{tag}> before it")
        tool, argument = self.tags[tag]
        following = self._markers.search(text, marker.end())
        if following is None or following[0] != f"</{tag}>":
            end = following.start() if following else len(text)
            reason = unclosed(f"<{tag}>", f"</{tag}>", truncated and following is None)
            return [ParseFailure("", reason, tool, (start, end))], end
        value, end = text[marker.end() : following.start()].strip(), following.end()
        if not value:
            return [ParseFailure("", f"<{tag}> is empty; put the {argument} in it", tool, (start, end))], end
        return [ToolCall("", tool, {argument: value}, (start, end))], end


def unclosed(opening: str, closing: str, truncated: bool) -> str:
    if truncated:
        return cut_off(closing)
    return f"{opening} is not closed by {closing}, so it did not run"
