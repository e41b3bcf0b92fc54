"""The base of the renderers that use the model's own chat template, and the one for inline syntaxes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from actors.call_syntax import CallSyntax
from actors.chat_template import ChatTemplate
from actors.tokens import Tokens
from actors.worked_examples import in_one_turn
from tasks.types import Message, Task
from toolcall.registry import Tool
from toolcall.types import ParsedTurn, ToolResult

END_OF_MESSAGE = ("<|eom_id|>", "<|eom|>")  # Llama may end a turn that calls a tool by these


class RendererError(ValueError):
    """The template, the tools and the task do not fit together. One sentence with the mend."""


class TokenizerRenderer:
    """Prompts by the chat template, parsing by the text of the turn."""

    def __init__(self, tokenizer: Any, task: Task, syntax: CallSyntax, template: ChatTemplate) -> None:
        self.syntax = syntax
        assert syntax.parser is not None  # these renderers parse text
        self._parser = syntax.parser
        self._template = template
        self._tokens = Tokens(tokenizer, self._parser.markers)
        self._prefill = task.prefill
        self._tools_in_prompt = task.tools_in_prompt
        self._offer = self._offer_where_nobody_does(task.tools)
        self._end_of_turn = self._tokens.literal(template.end_of_turn())[:1]
        self._ends = self._end_tokens(tokenizer)
        self.stop = tuple(self._parser.stop)
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_token_ids = tuple(dict.fromkeys((*self._ends, *eos)))

    def offering(self, tools: Sequence[Tool]) -> Self:
        other = copy.copy(self)
        other._parser = self._parser.for_tools([tool.schema() for tool in tools])
        shown = None if self._parser.inline else shown_schemas(tools, self._tools_in_prompt)
        other._template = self._template.offering(shown)
        other._offer = other._offer_where_nobody_does(tools)
        return other

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._tokens.literal(self.template(messages) + self._prefill)

    def template(self, messages: Sequence[Message]) -> str:
        """The prompt as text, without the prefill."""
        shown = self._show(messages)
        return self._template.render(_with_system(shown, self._offer) if self._offer else shown)

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, truncated: bool) -> ParsedTurn:
        thinking = self._tokens.in_thinking(prompt_ids, self._prefill)
        return self._parser.parse(self.text(sampled_ids), truncated=truncated, thinking=thinking)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokens.text(token_ids)

    def plain(self, text: str) -> list[int]:
        return self._tokens.plain(text)

    def _show(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their worked examples in the model's call syntax."""
        raise NotImplementedError

    def _end_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """Tokens by which a turn of this template ends. Ordinary text, such as a line break before the next
        speaker, is none: it may stand anywhere."""
        added = tokenizer.get_added_vocab()
        control = {*added.values(), *tokenizer.all_special_ids}
        own = [token for token in self._end_of_turn if token in control]
        return (*own, *(added[token] for token in END_OF_MESSAGE if token in added))

    def _offer_where_nobody_does(self, tools: Sequence[Tool]) -> str:
        """What the system message must say because neither the prompt nor the template shows the tools."""
        if self._tools_in_prompt or not tools:
            return ""
        if not self._parser.inline and self._template.shows_tools:
            return ""
        return self._parser.offer([tool.schema() for tool in tools])


class InlineRenderer(TokenizerRenderer):
    """Results continue the assistant turn in which the call stands."""

    def __init__(self, tokenizer: Any, task: Task) -> None:
        assert task.parser is not None  # "auto" never chooses an inline syntax
        syntax = CallSyntax.of(task.parser)
        super().__init__(tokenizer, task, syntax, ChatTemplate(tokenizer, None))

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        text = "".join(self._parser.render_result(result) for result in results)
        # The stop string may end inside a token such as ">\n"; then that newline is already there.
        if text.startswith("\n") and self.text(sampled_ids[-1:]).endswith("\n"):
            text = text[1:]
        return self._tokens.plain(text)

    def _show(self, messages: Sequence[Message]) -> list[Message]:
        return in_one_turn(messages, self._parser)


def shown_schemas(tools: Sequence[Tool], tools_in_prompt: bool) -> list[dict[str, Any]] | None:
    """What a chat template is given to show; nothing if the prompt itself teaches the tools."""
    return None if tools_in_prompt else [tool.schema() for tool in tools] or None


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation with `text` at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
