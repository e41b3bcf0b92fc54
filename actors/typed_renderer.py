"""Chat formats that the `renderers` package knows at token level (Qwen3, Llama 3, GLM, DeepSeek, ...).

Its bridge extends the exact tokens so far by new messages; where it declines, the episode ends with an
error instead of silently re-rendering. Unless the task names a parser, its `parse_response` finds the calls,
see `actors.token_parsing`. Made by `actors.renderer.make_renderer`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from actors.base_renderer import RendererError, shown_schemas
from actors.call_syntax import CallSyntax
from actors.chat_template import result_message
from actors.token_parsing import read_response
from actors.tokens import Tokens
from tasks.types import Message, Task
from toolcall.parsers.results import shown
from toolcall.registry import Tool
from toolcall.types import ParsedTurn, ToolResult


def typed_renderer_name(tokenizer: Any) -> str | None:
    """The package's renderer for this tokenizer: by hub name, or by a folder named like `org/name`."""
    from renderers.base import MODEL_RENDERER_MAP

    name = "/".join(str(tokenizer.name_or_path).rstrip("/").split("/")[-2:])
    return MODEL_RENDERER_MAP.get(name)


class TypedRenderer:
    def __init__(self, tokenizer: Any, task: Task, name: str) -> None:
        from renderers import config_from_name, create_renderer

        try:
            config: Any = config_from_name(name)
            self._renderer: Any = create_renderer(tokenizer, config)
        except (ValueError, AssertionError) as error:  # unknown; or a token of the format is not there
            raise RendererError(f"model.renderer = {name!r} does not fit this tokenizer: {error}") from error
        self._parser = task.parser
        why = f"token by token by the renderers package, which knows {name!r}"
        self.syntax = CallSyntax(name, why) if task.parser is None else CallSyntax.of(task.parser)
        self._schemas = shown_schemas(task.tools, task.tools_in_prompt)
        self._tools_in_prompt = task.tools_in_prompt
        self._prefill = task.prefill
        self.stop = () if task.parser is None else tuple(task.parser.stop)
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        kept = [text for text, id in tokenizer.get_added_vocab().items() if id not in self.stop_token_ids]
        self._tokens = Tokens(tokenizer, kept)

    def offering(self, tools: Sequence[Tool]) -> Self:
        other = copy.copy(self)
        other._parser = self._parser.for_tools([tool.schema() for tool in tools]) if self._parser else None
        other._schemas = shown_schemas(tools, self._tools_in_prompt)
        return other

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        ids = self._renderer.render_ids(list(messages), tools=self._schemas, add_generation_prompt=True)
        return ids + self._tokens.literal(self._prefill)

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        messages = [
            # The package encodes what it is given with special tokens on.
            result_message(result.call_id, result.name, self._tokens.defused(shown(result)))
            for result in results
        ]
        prompt, sampled = list(prompt_ids), list(sampled_ids)
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=self._schemas)
        so_far = prompt + sampled
        if bridged is None or bridged.token_ids[: len(so_far)] != so_far:
            raise RendererError("the renderer cannot extend this conversation without re-rendering it")
        return bridged.token_ids[len(so_far) :] + self._tokens.literal(self._prefill)

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, truncated: bool) -> ParsedTurn:
        thinking = self._tokens.in_thinking(prompt_ids, self._prefill)
        if self._parser is not None:
            return self._parser.parse(self.text(sampled_ids), truncated=truncated, thinking=thinking)
        prompt, sampled = list(prompt_ids), list(sampled_ids)

        def respond() -> Any:
            return self._renderer.parse_response(sampled, tools=self._schemas, prompt_ids=prompt)

        return read_response(respond, sampled, self.text, truncated=truncated, thinking=thinking)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokens.text(token_ids)

    def plain(self, text: str) -> list[int]:
        return self._tokens.plain(text)
