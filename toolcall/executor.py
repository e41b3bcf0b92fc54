"""Runs the calls of a turn, all at once, and gives one result for each.

Invariant: `run` returns exactly one `ToolResult` per call or parse failure, in the order in which the model
wrote them, paired by id; no call delays or cancels another, and nothing that a tool does escapes as an
exception. One executor serves all trajectories of an actor, so limits, breakers and the cache are shared.
Called by `actors.agent_loop`.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolcall.errors import InvalidArguments
from toolcall.lane import RETRYABLE, Attempt, Lane, Limits
from toolcall.output import cut_to_budget
from toolcall.registry import Tool, load_tools
from toolcall.single_flight import SingleFlight
from toolcall.stats import CallCounter, ToolStats
from toolcall.types import CallSpan, Outcome, ParsedTurn, ParseFailure, ToolCall, ToolContext, ToolResult
from toolcall.work import finish, start

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
DEFAULT_MAX_OUTPUT_CHARS = 4000
BACKOFF_S = 0.2  # before the first retry; doubles, with jitter, up to the next
MAX_BACKOFF_S = 5.0
UNNAMED = "unknown"  # the name of a call too broken to show one; counts calls of invented names too


@dataclass(frozen=True)
class _Answer:
    """What became of one call, before it is paired with its id."""

    outcome: Outcome
    text: str
    started: float
    ended: float


class Executor:
    """tools: unique names. max_output_chars: budget of tools without their own. limits: see `Limits`.

    cache_entries: results kept for tools with `cache=True`. clock: seconds for spans, `time.time` but in
    tests; deadlines follow the event loop's clock.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
        limits: Limits | None = None,
        cache_entries: int = 4096,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tools = {tool.name: tool for tool in load_tools(tools)}
        self._lanes = {tool.name: Lane(tool, limits or Limits(), clock) for tool in self._tools.values()}
        self._max_output_chars = max_output_chars
        self._clock = clock
        self._cache: SingleFlight[_Answer] = SingleFlight(cache_entries, lambda a: a.outcome is Outcome.OK)
        self._counter = CallCounter()
        self._jitter = random.Random()  # not the trajectory's: retries must not change what tools draw

    async def run(self, parsed: ParsedTurn, context: ToolContext) -> tuple[ToolResult, ...]:
        """Answer every call of the turn. Takes as long as the slowest; if cancelled, cancels the calls.

        Bounded: per attempt `limits.max_queue_s` + the tool's timeout + a second, times its retries.
        """
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._result(call, context)) for call in parsed.calls]
        return tuple(call.result() for call in calls)

    async def finish(self, context: ToolContext) -> None:
        """Run the clean-ups that tools put on `context.resources`, once, newest first, at a trajectory's end.

        The caller bounds the time. What a clean-up raises is raised here after all have run.
        """
        await context.resources.aclose()

    async def close(self) -> None:
        """End what the tools share between trajectories, each once and within `CLOSE_TIMEOUT_S`. A failure
        is logged: it must not hide what ended the run."""
        for shutdown in {tool.shutdown for tool in self._tools.values() if tool.shutdown}:
            try:
                await finish(start(shutdown, is_async=True), CLOSE_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - a user's code, see above
                logger.warning("closing a tool failed: %r", error)

    def stats(self) -> dict[str, ToolStats]:
        """Counters per tool since the executor was made."""
        return self._counter.by_tool

    def take_metrics(self) -> dict[str, float]:
        """`tool/calls`, `tool/failures` and `tool/seconds` since the last call of this."""
        return self._counter.take_window()

    async def _result(self, call: ToolCall | ParseFailure, context: ToolContext) -> ToolResult:
        queued = self._clock()
        cached = False
        if isinstance(call, ParseFailure):
            answer = self._refused(Outcome.PARSE_ERROR, call.reason)
        elif (tool := self._tools.get(call.name)) is None:
            answer = self._refused(Outcome.UNKNOWN_TOOL, self._unknown(call.name))
        else:
            answer, cached = await self._invoke(tool, call, context)
        name = call.name or UNNAMED
        if cached:  # another call's run: this one took only its wait
            answer = replace(answer, started=queued, ended=self._clock())
        span = CallSpan(call.id, name, answer.outcome, queued, answer.started, answer.ended, cached)
        self._counter.add(name if name in self._tools else UNNAMED, span)
        return ToolResult(call.id, name, answer.outcome, answer.text, span)

    async def _invoke(self, tool: Tool, call: ToolCall, context: ToolContext) -> tuple[_Answer, bool]:
        try:
            arguments = tool.validate(call.arguments)
        except InvalidArguments as error:
            return self._refused(Outcome.INVALID_ARGUMENTS, f"{tool.name}: {error}"), False
        own = replace(context, idempotency_key=uuid.uuid4().hex)
        if not tool.options.cache:
            return await self._attempts(tool, arguments, own), False
        key = f"{tool.name} {tool.signature.canonical(arguments)}"
        return await self._cache.get(key, lambda: self._attempts(tool, arguments, own))

    async def _attempts(self, tool: Tool, arguments: dict, context: ToolContext) -> _Answer:
        """Try, and try again as often as the tool allows after a timeout or an infrastructure failure."""
        lane = self._lanes[tool.name]
        attempt = await lane.attempt(arguments, context)
        started = attempt.started
        for retry in range(tool.options.retries):
            if attempt.outcome not in RETRYABLE:
                break
            pause = min(BACKOFF_S * 2**retry, MAX_BACKOFF_S)
            await asyncio.sleep(pause * self._jitter.uniform(0.5, 1.0))
            attempt = await lane.attempt(arguments, context)
        return self._answer(tool, attempt, started)

    def _answer(self, tool: Tool, attempt: Attempt, started: float | None) -> _Answer:
        text = cut_to_budget(attempt.text, tool.options.max_output_chars or self._max_output_chars)
        return _Answer(attempt.outcome, text, attempt.ended if started is None else started, attempt.ended)

    def _refused(self, outcome: Outcome, text: str) -> _Answer:
        now = self._clock()
        return _Answer(outcome, cut_to_budget(text, self._max_output_chars), now, now)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._tools, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        return f"there is no tool {name!r}{hint} The tools are: {', '.join(self._tools) or 'none'}"
