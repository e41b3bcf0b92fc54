"""Episodes with a model behind an OpenAI-compatible endpoint, for evaluation and chat: text, no tokens.

The same task, limits, executor and rewards as in training; the loop is the chat protocol's: messages in, a
message with calls out. A server that gives structured calls is believed; one that leaves them in the text
(or a task whose prompt teaches its own syntax) is read by the task's parser. `http://host:8000/v1` means its
first model, `http://host:8000/v1#name` that one; the key is `$OPENAI_API_KEY`.

Invariant: as in `actors.agent_loop`, every episode ends as one `Finished`; an endpoint that fails is an error
of the episode, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai import AsyncOpenAI, BadRequestError, OpenAIError

from actors.agent_loop import Finished, clean_up, infrastructure_error, tool_context, with_success
from actors.recorder import Recorder
from buffer.messages import Lease, StopReason
from configs.schema import TaskConfig
from tasks.scoring import score
from tasks.types import Episode, Message, Score, Task
from toolcall.executor import Executor
from toolcall.parsers import make_parser
from toolcall.parsers.results import shown
from toolcall.types import ParsedTurn, ParseFailure, Parser, ToolCall, ToolContext, ToolResult

REQUEST_TIMEOUT_S = 120.0
RETRIES = 4  # by the client, with backoff, for refused connections, 429 and 5xx
PROBE_TIMEOUT_S = 20.0


class EndpointError(RuntimeError):
    """The endpoint cannot be used; one sentence with the mend."""


@dataclass
class Conversation:
    """One episode while it runs."""

    messages: list[Message]
    context: ToolContext
    schemas: list[dict[str, Any]]  # of the tools that its row offers
    turns: list[str] = field(default_factory=list)
    parsed: list[ParsedTurn] = field(default_factory=list)
    results: list[tuple[ToolResult, ...]] = field(default_factory=list)
    tokens: int = 0


class Endpoint:
    """Use as `async with Endpoint(url, limits, task) as endpoint`; `roll` is the evaluator's."""

    def __init__(
        self, url: str, limits: TaskConfig, task: Task, http: httpx2.AsyncClient | None = None
    ) -> None:
        self.url, _, self.model = url.partition("#")
        self._limits, self._task = limits, task
        self._executor = Executor(task.tools)
        self._parser = task.parser or make_parser("hermes")
        self._client = AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=REQUEST_TIMEOUT_S,
            max_retries=RETRIES,
            http_client=http,
        )

    async def __aenter__(self) -> Endpoint:
        if not self.model:
            try:
                models = await self._client.with_options(timeout=PROBE_TIMEOUT_S).models.list()
            except OpenAIError as error:
                raise EndpointError(
                    f"{self.url} does not list its models ({error}); start the server, or name the model as "
                    f"{self.url}#name"
                ) from error
            if not models.data:
                raise EndpointError(
                    f"{self.url} serves no model; start one there, or name it as {self.url}#name"
                )
            self.model = models.data[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._executor.close()
        await self._client.close()

    async def roll(self, draw: Any, lease: Lease, number: int) -> Finished:
        """Member `number` of an `actors.evaluator.Draw`."""
        seed = lease.seed % 2**31 + number  # within what servers take
        context = tool_context(lease, number, draw.row, self._task)
        schemas = [tool.schema() for tool in self._task.tools_of(draw.row)]
        messages = list(self._task.make_messages(draw.row))  # it grows; the task's own may be the row's
        talk = Conversation(messages, context, schemas)
        prompt = tuple(talk.messages)
        try:
            stop_reason, error = await self._talk(talk, draw.temperature, seed)
            episode = Episode(
                row=draw.row,
                messages=prompt,
                turns=tuple(talk.turns),
                results=tuple(talk.results),
                stop_reason=stop_reason,
                num_tokens=talk.tokens,
                parsed=tuple(talk.parsed),
                context=context,
            )
            scored = Score(None, error=error) if error else await score(self._task.rewards, episode)
        finally:
            await clean_up(self._executor, context)
        success, scored = with_success(self._task, episode, scored)
        trajectory = Recorder([]).finish(
            lease,
            number,
            actor="endpoint",
            task=self._task.name,
            stop_reason=stop_reason,
            reward=scored.reward,
            reward_components=scored.components,
            error=scored.error,
            metrics={},
        )
        return Finished(trajectory, episode, success)

    async def _talk(self, talk: Conversation, temperature: float, seed: int) -> tuple[StopReason, str | None]:
        limit = self._limits.trajectory_timeout_s
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                stop_reason = await self._turns(talk, temperature, seed)
        except OpenAIError as error:
            if _is_too_long(error):
                return StopReason.CONTEXT_LENGTH, None
            return StopReason.ERROR, f"endpoint: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - an answer that is none, say: an episode error is data
            if deadline.expired():
                return StopReason.DEADLINE, f"no end within {limit:g} s (task.trajectory_timeout_s)"
            return StopReason.ERROR, f"{type(error).__name__}: {error}"
        return stop_reason, infrastructure_error(talk.results)

    async def _turns(self, talk: Conversation, temperature: float, seed: int) -> StopReason:
        for turn in range(1, self._limits.max_turns + 1):
            parsed, cut = await self.step(talk, temperature, seed)
            if cut:
                return StopReason.MAX_TOKENS
            if not parsed.calls:
                return StopReason.ANSWER
            if turn < self._limits.max_turns:
                await self.invoke(talk, parsed)
        return StopReason.MAX_TURNS

    async def step(self, talk: Conversation, temperature: float, seed: int | None) -> tuple[ParsedTurn, bool]:
        """One message of the model: its calls, and whether the token limit cut it."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": talk.messages,
            "temperature": temperature,
            "max_tokens": self._limits.max_tokens_per_turn,
            "seed": seed,
        }
        if talk.schemas and not self._task.tools_in_prompt:
            request["tools"] = talk.schemas
        elif self._parser.stop:
            request["stop"] = list(self._parser.stop)[:4]  # what the protocol takes
        answer = await self._client.chat.completions.create(**request)
        choice = answer.choices[0]
        talk.tokens += answer.usage.completion_tokens if answer.usage else 0
        parsed, text = self._read(choice, self._parser.for_tools(talk.schemas))
        talk.turns.append(text)
        talk.parsed.append(parsed)
        talk.results.append(())
        talk.messages.append(_said(choice.message))
        return parsed, choice.finish_reason == "length"

    def _read(self, choice: Any, parser: Parser) -> tuple[ParsedTurn, str]:
        text = choice.message.content or ""
        if choice.message.tool_calls:
            calls = tuple(_call(call) for call in choice.message.tool_calls)
            whole = [call for call in calls if isinstance(call, ToolCall)]
            return ParsedTurn(calls, text), text + parser.render_calls(whole)
        text += _cut_stop(text, parser.stop) if choice.finish_reason == "stop" else ""
        return parser.parse(text, truncated=choice.finish_reason == "length"), text

    async def invoke(self, talk: Conversation, parsed: ParsedTurn) -> tuple[ToolResult, ...]:
        """Run the calls of the last message and append their results to the conversation."""
        results = await self._executor.run(parsed, talk.context)
        talk.results[-1] = results
        if talk.messages[-1].get("tool_calls"):
            talk.messages += [
                {"role": "tool", "tool_call_id": result.call_id, "content": shown(result)}
                for result in results
            ]
        else:
            text = "".join(self._parser.render_result(result, wrapped=True) for result in results)
            talk.messages.append({"role": "user", "content": text})
        return results


def _is_too_long(error: OpenAIError) -> bool:
    """The conversation has outgrown the model: the policy's doing, as in training, and no outage."""
    said = str(error).lower()
    return isinstance(error, BadRequestError) and ("context length" in said or "context_length" in said)


def _said(message: Any) -> Message:
    said: Message = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.function.name, "arguments": c.function.arguments},
            }
            for c in message.tool_calls
        ]
    return said


def _call(call: Any) -> ToolCall | ParseFailure:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return ParseFailure(call.id, f"the arguments are no valid JSON: {error}", name)
    if not isinstance(arguments, dict):
        return ParseFailure(call.id, "the arguments must be a JSON object", name)
    return ToolCall(call.id, name, arguments)


def _cut_stop(text: str, stop: Sequence[str]) -> str:
    """The stop string that a server has cut off: the first whose opening tag is open at the end."""
    for word in stop:
        opening = word.replace("</", "<")
        if text.count(opening) > text.count(word):
            return word
    return ""
