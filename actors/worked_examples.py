"""Worked examples in a prompt, written once for every syntax.

A task gives them as messages of OpenAI's interface: an assistant message with `tool_calls`, a `tool`
message with the plain result, an assistant message that goes on. Here they become what the model would
really see: the template's own calls, or the syntax's text; for inline syntaxes one assistant turn.
Used by `actors.renderer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.chat_template import calls_of
from tasks.types import Message
from toolcall.types import Parser


def in_messages(messages: Sequence[Message], parser: Parser, *, native: bool, wrapped: bool) -> list[Message]:
    """For syntaxes whose results are tool messages. `native`: the template writes the calls itself;
    `wrapped`: results need the syntax's own tag around them."""
    shown: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and not native:
            written = parser.render_calls(calls_of(message))
            message = {"role": "assistant", "content": _joined(message.get("content"), written)}
        elif message["role"] == "tool":
            message = {**message, "content": parser.render_text(message["content"], wrapped=wrapped)}
        shown.append(message)
    return shown


def in_one_turn(messages: Sequence[Message], parser: Parser) -> list[Message]:
    """For inline syntaxes: calls, results and what follows them are one assistant message."""
    shown: list[Message] = []
    going_on = False
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            content = parser.render_text(content)
        elif message.get("tool_calls"):
            content = _joined(content, parser.render_calls(calls_of(message)))
        in_a_turn = bool(shown) and shown[-1]["role"] == "assistant"
        if in_a_turn and (message["role"] == "tool" or (going_on and message["role"] == "assistant")):
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + content}
        else:
            shown.append({"role": message["role"], "content": content})
        going_on = bool(message.get("tool_calls")) or message["role"] == "tool"
    return shown


def _joined(content: str | None, calls: str) -> str:
    return f"{content}\n{calls}" if content else calls
