"""Results as tool messages of the model's own chat template, appended to the exact tokens so far.

The literal text that the template puts around results is derived once for each number of results, and
proven at start-up on a two-turn conversation. A template that rewrites earlier turns is refused, since no
exact continuation exists (CASES T8). Made by `actors.renderer.make_renderer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from actors.base_renderer import RendererError, TokenizerRenderer, shown_schemas
from actors.call_syntax import choose_syntax
from actors.chat_template import (
    ASK,
    ENCODINGS,
    PROBED,
    TURN,
    ChatTemplate,
    probe_calls,
    probe_id,
    probe_tool,
    result_message,
    result_probe,
)
from actors.worked_examples import in_messages
from tasks.types import Message, Task
from toolcall.types import CallSpan, Outcome, ToolResult

REWRITES = (
    "the chat template rewrites earlier turns when a message is added, so the sampled tokens could not be "
    "kept; set model.renderer to the model's family (see the renderers package) or use another template"
)


@dataclass(frozen=True)
class Frame:
    """Template text before, between and after some results, and how it writes a result's own text."""

    pieces: tuple[str, ...]
    encoding: Callable[[str], str]


class TemplateRenderer(TokenizerRenderer):
    def __init__(self, tokenizer: Any, task: Task) -> None:
        schemas = shown_schemas(task.tools, task.tools_in_prompt)
        template = ChatTemplate(tokenizer, schemas)
        syntax = choose_syntax(template, task.parser, [tool.schema() for tool in task.tools], bool(schemas))
        super().__init__(tokenizer, task, syntax, template)
        if not self._end_of_turn:
            raise RendererError("the chat template puts nothing after a turn, so results cannot follow one")
        self._frame = lru_cache(maxsize=None)(self._derive_frame)
        self._fixed = lru_cache(maxsize=None)(self._tokens.literal)  # of the few texts around results
        tag = self._parser.result_tag
        self._wrap = bool(tag) and f"<{tag}>" not in self._frame(1).pieces[0]
        self._prove()

    def observation(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], results: Sequence[ToolResult]
    ) -> list[int]:
        frame = self._frame(len(results))
        ids = self._filled(frame.pieces[0], results)
        if sampled_ids[-1] in self._ends:
            ids = ids[1:]  # the sampled one stays (mask 1); a missing one is added here (mask 0)
        for result, piece in zip(results, frame.pieces[1:], strict=True):
            text = self._parser.render_result(result, wrapped=self._wrap)
            ids += self._tokens.plain(frame.encoding(text)) + self._filled(piece, results)
        return ids + self._fixed(self._prefill)

    def _show(self, messages: Sequence[Message]) -> list[Message]:
        return in_messages(messages, self._parser, native=self.syntax.native, wrapped=self._wrap)

    def _derive_frame(self, count: int) -> Frame:
        tail = self._template.after_calls(count, self._tokens.decode(self._end_of_turn))
        for encoding in ENCODINGS:
            probes = [encoding(result_probe(number)) for number in range(count)]
            if all(tail.count(probe) == 1 for probe in probes):
                pieces = []
                for probe in probes:
                    before, tail = tail.split(probe)
                    pieces.append(before)
                return Frame((*pieces, tail), encoding)
        raise RendererError(
            "the chat template does not show tool messages; use a task whose parser is inline "
            '(task.parser = "tag"), or a model with a tool template'
        )

    def _filled(self, piece: str, results: Sequence[ToolResult]) -> list[int]:
        """The piece's ids, with the results' own call ids and tool names in place of the probes'."""
        ids: list[int] = []
        position = 0
        for probed in PROBED.finditer(piece):
            result = results[int(probed[2])]
            ids += self._fixed(piece[position : probed.start()])
            ids += self._tokens.plain(result.name if probed[1] else result.call_id)
            position = probed.end()
        return ids + self._fixed(piece[position:])

    def _prove(self) -> None:
        """The continuation must hold in the second turn as in the first, token for token."""
        turn = probe_calls(1) if self.syntax.native else {"role": "assistant", "content": TURN}
        prompt, end = self._template.render(ASK), self._tokens.decode(self._end_of_turn)
        one_turn = self._template.render([*ASK, turn], open_turn=False)
        if not one_turn.startswith(prompt) or end not in one_turn.rpartition(TURN)[2]:
            raise RendererError(REWRITES)
        sampled = self._tokens.literal(one_turn[len(prompt) : one_turn.index(end, one_turn.rindex(TURN))])
        span = CallSpan(probe_id(0), probe_tool(0), Outcome.OK, 0.0, 0.0, 0.0)
        result = ToolResult(probe_id(0), probe_tool(0), Outcome.OK, "result", span)
        ids = self._tokens.literal(prompt)
        for _ in range(2):
            observation = self.observation(ids, sampled, [result])
            ids += sampled + observation[: len(observation) - len(self._tokens.literal(self._prefill))]
        content = self._parser.render_text("result", wrapped=self._wrap)
        message = result_message(probe_id(0), probe_tool(0), content)
        history = self._template.render([*ASK, turn, message, turn, message])
        if self._tokens.decode(ids) != self._tokens.decode(self._tokens.literal(history)):
            raise RendererError(REWRITES)
