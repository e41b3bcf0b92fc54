"""What a chat template does with tools, found by rendering probes: nothing is guessed from its text.

Three facts: how it writes a call (so that the parser that reads it can be chosen, and worked examples look
like what the model was trained on), what it puts around results, and what ends a turn.
Used by `actors.renderer` and `actors.call_syntax`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tasks.types import Message
from toolcall.types import ToolCall

ASK: list[Message] = [{"role": "user", "content": "Q"}]
TURN = "@turn@"
ENCODINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""How a template may write a result's text: as it is, or as the inside of a JSON string (Llama 3)."""


class BadTemplate(ValueError):
    """The template cannot show what it is asked to; says why."""


class ChatTemplate:
    """schemas: the tools to be offered, or None. Each probe is made once, when it is asked for."""

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]] | None) -> None:
        self._tokenizer = tokenizer
        self._schemas = schemas
        self._arguments_as_text = False

    def offering(self, schemas: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """The same template with other tools; how it writes calls does not depend on them."""
        other = copy.copy(self)
        other._schemas = schemas
        return other

    def render(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        """The conversation as text; `open_turn`: with the header of the assistant turn to come."""
        return self._tokenizer.apply_chat_template(
            [self._in_its_types(message) for message in messages],
            tools=self._schemas,
            add_generation_prompt=open_turn,
            tokenize=False,
        )

    @property
    def shows_tools(self) -> bool:
        """Does a conversation name any of the schemas' tools?"""
        shown = self.render(ASK)
        if shown == self.offering(None)._try(ASK):  # a short name may stand in any text
            return False
        return any(schema["function"]["name"] in shown for schema in self._schemas or ())

    def end_of_turn(self) -> str:
        """What the template puts after an assistant turn's text."""
        text = self.render([*ASK, {"role": "assistant", "content": TURN}], open_turn=False)
        if TURN not in text:
            raise BadTemplate("the chat template does not show assistant messages")
        return text.rpartition(TURN)[2]

    def after_calls(self, count: int, end_of_turn: str) -> str:
        """From the end of a turn with `count` calls to the next turn, results in it as `result_probe(i)`.

        Written with calls of the template's own if it has them; some (Llama 3) have but one a turn.
        """
        results = [result_message(probe_id(i), probe_tool(i), result_probe(i)) for i in range(count)]
        if self.written_call is not None:
            text = self._try([*ASK, probe_calls(count), *results])
            if text is not None and end_of_turn in text.rpartition(TURN)[2]:
                after = text.rpartition(TURN)[2]
                return after[after.index(end_of_turn) :]
        text = self.render([*ASK, {"role": "assistant", "content": TURN}, *results])
        return text.rpartition(TURN)[2]

    @cached_property
    def written_call(self) -> str | None:
        """How the template writes the turn `probe_calls(1)`; None if it shows no calls."""
        for self._arguments_as_text in (False, True):
            text = self._try([*ASK, probe_calls(1)], open_turn=False)
            if text is not None and probe_tool(0) in text and TURN in text:
                for start in (self._try(ASK), self._try(ASK, open_turn=False)):
                    if start is not None and text.startswith(start):
                        return text[len(start) :]
                return text
        self._arguments_as_text = False
        return None

    def _try(self, messages: Sequence[Message], *, open_turn: bool = True) -> str | None:
        """None where the template cannot render them: templates raise whatever Jinja and Python do."""
        from jinja2 import TemplateError

        try:
            return self.render(messages, open_turn=open_turn)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return None

    def _in_its_types(self, message: Message) -> Message:
        """Some templates (DeepSeek) want a call's arguments as JSON text, others as an object."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if self._arguments_as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**message, "tool_calls": calls}


def call_message(content: str, calls: Sequence[ToolCall]) -> Message:
    """An assistant message that calls tools, in the form of OpenAI's interface."""
    tool_calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def result_message(call_id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an assistant message in that form; arguments may be JSON text."""
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        calls.append(ToolCall(call.get("id") or f"call{number:05d}", function["name"], arguments))
    return calls


def probe_calls(count: int) -> Message:
    """An assistant message with `count` calls, each with the argument TURN."""
    calls = [ToolCall(probe_id(i), probe_tool(i), {"argument": TURN}) for i in range(count)]
    return call_message("", calls)


def probe_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return f"probe{number:04d}"


def result_probe(number: int) -> str:
    """A result whose quote and accent show how the template encodes it."""
    return f'@result{number}"é@'


def probe_tool(number: int) -> str:
    return f"named_{probe_id(number)}"


PROBED = re.compile(r"(named_)?probe(\d{4})")
"""An id or (group 1) a name of a probe in what the template writes, and its number."""
