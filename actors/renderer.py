"""From messages and tool results to token ids. Sampled tokens are never rendered again.

Two ways to go on after a turn, one interface:
- `InlineRenderer`: results continue the same assistant turn (the tag form of Search-R1).
- `TemplateRenderer`: results are tool messages. The literal text that the chat template puts around
  them is derived once from the template and proven on a two-turn conversation; a template that
  rewrites earlier turns is refused at start-up, since no exact continuation exists (CASES T8).
- `actors.typed_renderer` wraps the `renderers` package for the model families that it knows.

Invariant: tool text is tokenised as plain text, so it can never become a special token (CASES T7).
Called by the agent loop, the evaluator and `launch.py check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tasks.types import Message, Task
from toolcall.types import Parser, ToolResult


class RendererError(ValueError):
    """The template, the tools and the task do not fit together. One sentence with the mend."""


class Renderer(Protocol):
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

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
        """What the model wrote, without special tokens: for parsers and rewards, never encoded again."""
        ...


def make_renderer(tokenizer: Any, task: Task, renderer: str = "auto") -> Renderer:
    """The renderer for this tokenizer and task, checked: the prompt must offer every tool (CASES C15)."""
    from actors.typed_renderer import TypedRenderer, typed_renderer_name

    name = typed_renderer_name(tokenizer) if renderer == "auto" else renderer
    made: Renderer
    if task.parser.inline:
        made = InlineRenderer(tokenizer, task)
    elif name not in (None, "template"):
        made = TypedRenderer(tokenizer, task, name)
    else:
        made = TemplateRenderer(tokenizer, task)
    _check_tools_offered(tokenizer, task, made)
    return made


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


class TokenizerRenderer:
    """What all renderers share: encoding prompts and plain text, decoding turns."""

    def __init__(self, tokenizer: Any, task: Task) -> None:
        self._tokenizer = tokenizer
        self._parser: Parser = task.parser
        self._schemas = None if task.tools_in_prompt else [tool.schema() for tool in task.tools] or None
        self._offer = self._offer_for_ignorant_template()
        self._prefill = task.prefill
        self.stop = tuple(task.parser.stop)
        self.stop_token_ids: tuple[int, ...] = (tokenizer.eos_token_id,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.literal(self.template(messages) + self._prefill)

    def template(self, messages: Sequence[Message]) -> str:
        return self._apply(_with_system(messages, self._offer) if self._offer else messages)

    def _offer_for_ignorant_template(self) -> str:
        """What the system message must say because the chat template does not show tools; else empty."""
        if self._schemas is None:
            return ""
        probe = [{"role": "user", "content": "Q"}]
        shown = self._apply(probe)
        ignored = all(schema["function"]["name"] not in shown for schema in self._schemas)
        return self._parser.offer(self._schemas) if ignored else ""

    def _apply(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=self._schemas, add_generation_prompt=True, tokenize=False
        )

    def literal(self, text: str) -> list[int]:
        """Encode template text: special tokens are special."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def plain(self, text: str) -> list[int]:
        """Encode text from outside: what looks like a special token becomes ordinary tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation with `text` at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class InlineRenderer(TokenizerRenderer):
    """Results continue the assistant turn in which the call stands."""

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        text = "".join(self._parser.render_result(result) for result in results)
        # The stop string may end inside a token such as ">\n"; then that newline is already there.
        if text.startswith("\n") and self.text(sampled_ids[-1:]).endswith("\n"):
            text = text[1:]
        return self.plain(text)


class TemplateRenderer(TokenizerRenderer):
    """Results are tool messages of the model's own chat template."""

    def __init__(self, tokenizer: Any, task: Task) -> None:
        super().__init__(tokenizer, task)
        self._pieces = lru_cache(maxsize=None)(self._derive_pieces)
        first = self._pieces(1)
        self._prove(first)
        self._end_of_turn = first[0][0]
        self.stop_token_ids = tuple(dict.fromkeys((self._end_of_turn, tokenizer.eos_token_id)))

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        pieces = self._pieces(len(results))
        # A sampled end-of-turn token stays the sampled one (mask 1); a missing one is added here (mask 0).
        ids = list(pieces[0][1:] if sampled_ids[-1] == self._end_of_turn else pieces[0])
        for result, piece in zip(results, pieces[1:], strict=True):
            ids += self.plain(self._parser.render_result(result, wrapped=True)) + piece
        return ids + self.literal(self._prefill)

    def _derive_pieces(self, results: int) -> list[list[int]]:
        """Ids that the template puts before, between and after `results` tool messages."""
        opening = [{"role": "user", "content": "Q"}]
        contents = [f"@R{i}@" for i in range(results)]
        turn = {"role": "assistant", "content": "@A@"}
        tool_messages = [{"role": "tool", "content": content} for content in contents]
        tail = self._after(self.template(opening) + "@A@", [*opening, turn, *tool_messages])
        pieces = []
        for content in contents:
            if tail.count(content) != 1:
                raise RendererError(
                    "the chat template does not show tool messages; use a task whose parser is inline "
                    '(`syntax = "tag"`), or a model with a tool template'
                )
            before, tail = tail.split(content)
            pieces.append(self.literal(before))
        return [*pieces, self.literal(tail)]

    def _prove(self, pieces: list[list[int]]) -> None:
        """The continuation must hold in the second turn as in the first, token for token."""
        opening = [{"role": "user", "content": "Q"}]
        history = list(opening)
        ids = self.literal(self.template(opening))
        for number in ("one", "two"):
            turn, observed = f"call {number}", f"result {number}"
            history += [{"role": "assistant", "content": turn}, {"role": "tool", "content": observed}]
            ids += self.literal(turn) + pieces[0] + self.plain(observed) + pieces[1]
        if self._tokenizer.decode(ids) != self._tokenizer.decode(self.literal(self.template(history))):
            raise RendererError(_REWRITES)

    def _after(self, prefix: str, messages: list[Message]) -> str:
        text = self.template(messages)
        if not text.startswith(prefix):
            raise RendererError(_REWRITES)
        return text[len(prefix) :]


_REWRITES = (
    "the chat template rewrites earlier turns when a message is added, so the sampled tokens could not be "
    "kept; set model.renderer to the model's family (see the renderers package) or use another template"
)


def _check_tools_offered(tokenizer: Any, task: Task, renderer: Renderer) -> None:
    if not task.tools:
        return
    text = tokenizer.decode(renderer.prompt(task.make_messages(task.train[0])))
    names = [task.parser.offered_as(tool.name) for tool in task.tools]
    missing = [name for name in names if name not in text]
    if missing:
        raise RendererError(
            f"the prompt never offers {', '.join(missing)} to the model: the chat template ignores tools and "
            "the task's prompt does not show them; describe them in the prompt or take a tool template"
        )
