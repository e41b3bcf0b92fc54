"""From messages and tool results to token ids, and from sampled ids to calls. Sampled tokens are never
rendered again.

Three ways to go on after a turn, one interface:
- `InlineRenderer`: results continue the same assistant turn (the tag form of Search-R1).
- `TemplateRenderer`: results are tool messages of the model's own chat template.
- `TypedRenderer`: the same by the `renderers` package, for the model families that it knows.

Invariant: tool text is tokenised as plain text, so it can never become a special token (CASES T7).
Called by the agent loop, the evaluator and `launch.py check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from actors.base_renderer import InlineRenderer, RendererError
from actors.call_syntax import CallSyntax, UnknownSyntax
from actors.chat_template import BadTemplate
from actors.template_renderer import TemplateRenderer
from actors.typed_renderer import TypedRenderer, typed_renderer_name
from tasks.mixture import Mixture
from tasks.types import Message, Task
from toolcall.registry import Tool
from toolcall.types import ParsedTurn, ToolResult

__all__ = ["Renderer", "RendererError", "load_tokenizer", "make_renderer", "make_renderers"]


class Renderer(Protocol):
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    syntax: CallSyntax

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def offering(self, tools: Sequence[Tool]) -> Self:
        """The renderer of an episode whose row offers these tools and no others."""
        ...

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        """The ids to append after `prompt_ids + sampled_ids` (all before this turn, this turn) to show
        `results` and open the next turn."""
        ...

    def plain(self, text: str) -> list[int]:
        """Text from outside as ids, none of them special: for counting."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model wrote, without special tokens but those of its call syntax: for parsers and
        rewards, never encoded again."""
        ...

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, truncated: bool) -> ParsedTurn:
        """The calls of the turn `sampled_ids`. Positions are characters of `text(sampled_ids)`."""
        ...


def make_renderer(tokenizer: Any, task: Task, renderer: str = "auto") -> Renderer:
    """The renderer for this tokenizer and task, checked: the prompt must offer every tool (CASES C15)."""
    from jinja2 import TemplateError

    if task.offered is not None:
        task = replace(task, tools=task.tools_of(task.train[0]))
    try:
        made = _make(tokenizer, task, typed_renderer_name(tokenizer) if renderer == "auto" else renderer)
    except (UnknownSyntax, BadTemplate) as error:
        raise RendererError(str(error)) from error
    except TemplateError as error:
        raise RendererError(f"the chat template refuses a conversation with tools: {error}") from error
    _check_tools_offered(tokenizer, task, made)
    return made


def make_renderers(tokenizer: Any, mixture: Mixture, renderer: str = "auto") -> list[Renderer]:
    """One for each task of the run."""
    return [make_renderer(tokenizer, part.task, renderer) for part in mixture.parts]


def load_tokenizer(model_path: Path) -> Any:
    """The model's own tokenizer; a folder without a chat template is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    if not tokenizer.chat_template:
        raise RendererError(
            f"the tokenizer in {model_path} has no chat template; "
            "add chat_template.jinja to the folder or take an instruct model"
        )
    return tokenizer


def _make(tokenizer: Any, task: Task, name: str | None) -> Renderer:
    if task.parser is not None and task.parser.inline:
        return InlineRenderer(tokenizer, task)
    if name is None or name == "template":
        return TemplateRenderer(tokenizer, task)
    return TypedRenderer(tokenizer, task, name)


def _check_tools_offered(tokenizer: Any, task: Task, renderer: Renderer) -> None:
    if not task.tools:
        return
    text = tokenizer.decode(renderer.prompt(task.make_messages(task.train[0])))
    missing = [name for tool in task.tools if (name := renderer.syntax.offered_as(tool.name)) not in text]
    if missing:
        raise RendererError(
            f"the prompt never offers {', '.join(missing)} to the model: the chat template ignores tools and "
            "the task's prompt does not show them; describe them in the prompt or take a tool template"
        )
