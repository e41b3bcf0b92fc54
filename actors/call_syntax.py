"""Which parser reads a model's calls, and why: `task.parser = "auto"`.

The proof is the template itself: the parser that reads back the call that the chat template writes. A
parser chosen by hand is refused where the template teaches the model another syntax.
Used by `actors.renderer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.chat_template import TURN, ChatTemplate, probe_tool
from toolcall.parsers import MESSAGE_SYNTAXES, make_parser
from toolcall.types import Parser, ToolCall


class UnknownSyntax(ValueError):
    """No parser reads what the chat template writes."""


@dataclass(frozen=True)
class CallSyntax:
    """`parser`: None where calls are found at token level. `native`: the parser reads the calls that the
    chat template writes."""

    name: str
    why: str
    parser: Parser | None = None
    native: bool = False

    @classmethod
    def of(cls, parser: Parser, why: str = "chosen by the task", native: bool = False) -> CallSyntax:
        return cls(parser.name, why, parser, native)

    def __str__(self) -> str:
        return f"call syntax {self.name}: {self.why}"

    def offered_as(self, tool: str) -> str:
        return tool if self.parser is None else self.parser.offered_as(tool)


def choose_syntax(
    template: ChatTemplate, parser: Parser | None, schemas: Sequence[dict[str, Any]], taught_by_template: bool
) -> CallSyntax:
    """The task's own parser, or (None) the one that fits the template."""
    written = template.written_call
    fitting = _reader_of(written) if written is not None else None
    if parser is not None:
        native = written is not None and _reads(parser, written)
        if taught_by_template and not native and fitting is not None:
            raise UnknownSyntax(
                f"task.parser is {parser.name!r}, but the chat template teaches the model to write calls as "
                f'{fitting!r}; set task.parser = "auto" or {fitting!r}'
            )
        return CallSyntax.of(parser, native=native)
    if written is None and taught_by_template and template.shows_tools:
        raise UnknownSyntax(
            "the chat template offers tools but does not show how a call of one is written; name the "
            f"syntax with task.parser, one of: {', '.join(MESSAGE_SYNTAXES)}"
        )
    if written is None:
        why = "chosen since the chat template shows no calls of its own"
        return CallSyntax.of(make_parser("hermes", schemas), why)
    if fitting is None:
        raise UnknownSyntax(
            f"no parser reads the calls of this chat template, such as {written.strip()!r}; set "
            "model.renderer to the model's family, or describe the tools in the prompt and use an inline "
            'syntax (task.parser = "tag")'
        )
    why = "chosen since it reads back the call that the chat template writes"
    return CallSyntax.of(make_parser(fitting, schemas), why, native=True)


def _reader_of(written: str) -> str | None:
    return next((name for name in MESSAGE_SYNTAXES if _reads(make_parser(name), written)), None)


def _reads(parser: Parser, written: str) -> bool:
    """Does `parser` find the probe's call, whole and alone, in what the template writes?"""
    calls = parser.parse(written).calls
    if len(calls) != 1 or not isinstance(calls[0], ToolCall):
        return False
    return (calls[0].name, calls[0].arguments) == (probe_tool(0), {"argument": TURN})
