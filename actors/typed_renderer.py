"""Chat formats that the `renderers` package knows at token level (Qwen3, Llama 3, GLM, DeepSeek, ...).

Its bridge extends the exact tokens so far by new messages; where it declines, the episode ends with an
error instead of silently re-rendering. Used through `actors.renderer.make_renderer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.renderer import RendererError, TokenizerRenderer
from tasks.types import Message, Task
from toolcall.types import ToolResult


def typed_renderer_name(tokenizer: Any) -> str | None:
    """The package's renderer for this tokenizer: by hub name, or by a folder named like `org/name`."""
    from renderers.base import MODEL_RENDERER_MAP

    name = "/".join(str(tokenizer.name_or_path).rstrip("/").split("/")[-2:])
    return MODEL_RENDERER_MAP.get(name)


class TypedRenderer(TokenizerRenderer):
    def __init__(self, tokenizer: Any, task: Task, name: str) -> None:
        super().__init__(tokenizer, task)
        from renderers import config_from_name, create_renderer

        try:
            config: Any = config_from_name(name)
            self._renderer: Any = create_renderer(tokenizer, config)
        except ValueError as error:
            raise RendererError(f"model.renderer = {name!r}: {error}") from error
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        self._special = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        ids = self._renderer.render_ids(list(messages), tools=self._schemas, add_generation_prompt=True)
        return ids + self.literal(self._prefill)

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        messages = [
            {"role": "tool", "content": self._defuse(result.text), "tool_call_id": result.call_id}
            for result in results
        ]
        prompt, sampled = list(prompt_ids), list(sampled_ids)
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=self._schemas)
        so_far = prompt + sampled
        if bridged is None or bridged.token_ids[: len(so_far)] != so_far:
            raise RendererError("the renderer cannot extend this conversation without re-rendering it")
        return bridged.token_ids[len(so_far) :] + self.literal(self._prefill)

    def _defuse(self, text: str) -> str:
        """The package encodes tool text with special tokens on: break each one's spelling instead."""
        for token in self._special:
            text = text.replace(token, token[0] + "\u200b" + token[1:])
        return text
