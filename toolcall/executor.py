"""Runs the calls of a turn, all at once, and gives one result for each.

Invariant: `run` returns exactly one `ToolResult` per call or parse failure, in the order in which the model
wrote them, paired by id; no call delays or cancels another, and nothing that a tool does escapes as an
exception. Every call leaves its span on the context, a cancelled one too. One executor serves all
trajectories of an actor, so limits, breakers and the cache are shared. Called by `actors.agent_loop`.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
import random
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from metrics import names
from toolcall.cache_store import CacheStore
from toolcall.errors import InvalidArguments
from toolcall.health import Health
from toolcall.lane import RETRYABLE, Attempt, Lane, Limits
from toolcall.output import cut_to_budget
from toolcall.registry import Tool, load_tools
from toolcall.single_flight import SingleFlight
from toolcall.stats import CallCounter, ToolStats
from toolcall.types import CallSpan, Outcome, ParsedTurn, ParseFailure, ToolCall, ToolContext, ToolResult
from toolcall.work import finish, start

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 10.0
DEFAULT_MAX_OUTPUT_TOKENS = 1000
CHARS_PER_TOKEN = 4  # of an executor that was given no tokenizer's count
MAX_BACKOFF_S = 5.0
UNNAMED = "unknown"  # the name of a call too broken to show one; counts calls of invented names too


@dataclass(frozen=True)
class _Answer:
    """What became of one call, before it is paired with its id."""

    outcome: Outcome
    text: str
    started: float
    ended: float
    cache: str = ""  # see CallSpan
    made: float = 0.0  # when the text was made, for a cached one


class Executor:
    """tools: unique names. max_output_tokens: budget of tools without their own, in what `count_tokens`
    counts. limits: see `Limits`. shared: a folder of the run for what its actors share: limits of the whole
    run, the disk cache; without it these hold in this process. cache_entries: results kept in memory.
    clock: seconds for spans, `time.time` but in tests; deadlines follow the event loop's clock.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_output_tokens: int = DEFAULT_MAX_OUTPUT_TOKENS,
        count_tokens: Callable[[str], int] = lambda text: -(-len(text) // CHARS_PER_TOKEN),
        limits: Limits | None = None,
        shared: Path | None = None,
        cache_entries: int = 4096,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = self._limits = limits or Limits()
        self._tools = {tool.name: tool for tool in load_tools(tools)}
        self._lanes = {tool.name: Lane(tool, limits, shared, clock) for tool in self._tools.values()}
        self._health = {name: Health(limits.down_share) for name in self._tools}
        self._max_output_tokens = max_output_tokens
        self._count_tokens = count_tokens
        self._clock = clock
        self._cache: SingleFlight[_Answer] = SingleFlight(cache_entries, lambda a: a.outcome is Outcome.OK)
        on_disk = shared and any(tool.options.cache == "disk" for tool in self._tools.values())
        self._store = (
            CacheStore(shared / f"cache-{socket.gethostname()}.sqlite") if shared and on_disk else None
        )
        self._counter = CallCounter()
        self._jitter = random.Random()  # not the trajectory's: retries must not change what tools draw

    async def run(self, parsed: ParsedTurn, context: ToolContext) -> tuple[ToolResult, ...]:
        """Answer every call of the turn. Takes as long as the slowest; if cancelled, cancels the calls.

        Bounded: per attempt the tool's queue_timeout + its timeout + a second, times its retries.
        """
        if len(parsed.calls) == 1:  # the common case needs no group
            return (await self._result(parsed.calls[0], context),)
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
        for lane in self._lanes.values():
            lane.close()
        if self._store is not None:
            self._store.close()

    # --- what is seen from outside ---------------------------------------------------------------

    def stats(self) -> dict[str, ToolStats]:
        """Counters per tool since the executor was made."""
        return self._counter.by_tool

    def take_metrics(self) -> dict[str, float]:
        """`tool/<name>/…` of `metrics.names`, since the last call of this."""
        taken = self._counter.take_window()
        for name, lane in self._lanes.items():
            if most := lane.take_most_running():
                taken[f"{names.TOOL_PREFIX}{name}/{names.TOOL_EACH_RUNNING_MAX}"] = most
        return taken

    def note_blocked(self, task: str, seconds: float) -> None:
        """A task held the event loop up; counted if it is a tool's. Called from the watchdog's thread."""
        name = task.removeprefix("tool ")
        if name in self._tools:
            self._counter.add_blocked(name, seconds)

    def down(self) -> dict[str, str]:
        """Tools that are not there at present, by name, and why. See `toolcall.health`."""
        return {name: health.reason for name, health in self._health.items() if health.down}

    async def probe(self) -> bool:
        """Ask the tools that are down and can be asked whether they are back. Is none of those left?"""
        asked = [self._tools[name] for name in self.down() if self._tools[name].probe is not None]
        return all([await self._answers(tool) for tool in asked])

    async def _answers(self, tool: Tool) -> bool:
        assert tool.probe is not None
        try:
            await finish(start(tool.probe, is_async=True), PROBE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a user's code; still down, whatever it says
            self._health[tool.name].reason = f"{tool.name} is unavailable ({error})"
            return False
        self._health[tool.name].recovered()
        self._lanes[tool.name].recovered()
        return True

    # --- one call --------------------------------------------------------------------------------

    async def _result(self, call: ToolCall | ParseFailure, context: ToolContext) -> ToolResult:
        queued = self._clock()
        name = call.name or UNNAMED
        offered = self._offered(context)
        tool = None if isinstance(call, ParseFailure) else offered.get(name)
        try:
            if isinstance(call, ParseFailure):
                answer = self._refused(Outcome.PARSE_ERROR, call.reason)
            elif tool is None:
                answer = self._refused(Outcome.UNKNOWN_TOOL, _unknown(name, offered))
            else:
                answer = await self._invoke(tool, call, context)
        except asyncio.CancelledError:
            self._note(CallSpan(call.id, name, Outcome.CANCELLED, queued, queued, self._clock()), context)
            raise
        age = max(0.0, self._clock() - answer.made) if answer.cache in ("kept", "disk") else 0.0
        span = CallSpan(
            call.id, name, answer.outcome, queued, answer.started, answer.ended, answer.cache, age
        )
        self._note(span, context)
        if name in self._health and tool is not None and not span.cached:
            self._health[name].add(answer.outcome, answer.text)
        keep = tool.options.keep if tool is not None else "head"
        return ToolResult(call.id, name, answer.outcome, answer.text, span, keep)

    def _offered(self, context: ToolContext) -> Mapping[str, Tool]:
        """What this trajectory may call; the executor's own tools are those under its options."""
        if context.offered is None:
            return self._tools
        return {name: self._tools.get(name) or tool for name, tool in context.offered.items()}

    def _lane(self, tool: Tool, context: ToolContext) -> Lane:
        """A tool that only a trajectory's row describes shares its limits with nobody."""
        if tool.name in self._lanes:
            return self._lanes[tool.name]
        key = f"lane of {tool.name}"
        if key not in context.instances:
            context.instances[key] = Lane(tool, self._limits, None, self._clock)
        return context.instances[key]

    def _note(self, span: CallSpan, context: ToolContext) -> None:
        context.spans.append(span)
        self._counter.add(span.name if span.name in self._tools else UNNAMED, span)

    async def _invoke(self, tool: Tool, call: ToolCall, context: ToolContext) -> _Answer:
        try:
            arguments = tool.validate(call.arguments)
        except InvalidArguments as error:
            return self._refused(Outcome.INVALID_ARGUMENTS, f"{tool.name}: {error}")
        if tool.signature.takes_context:
            context = replace(context, idempotency_key=uuid.uuid4().hex)
        if not tool.options.cache:
            return await self._attempts(tool, arguments, context)
        return await self._cached(tool, arguments, context)

    async def _cached(self, tool: Tool, arguments: dict, context: ToolContext) -> _Answer:
        asked = self._clock()
        canonical = f"{tool.name}\0{tool.fingerprint}\0{tool.signature.canonical(arguments)}"
        key = hashlib.sha256(canonical.encode()).hexdigest()

        async def make() -> _Answer:
            return await self._through_store(tool, key, arguments, context)

        answer, served = await self._cache.get(key, make, lambda kept: self._is_fresh(tool, kept.made))
        if answer.cache == "made" and served == "made":
            return answer
        cache = answer.cache if served == "made" else str(served)
        return replace(answer, started=asked, ended=self._clock(), cache=cache)  # took only its wait

    async def _through_store(self, tool: Tool, key: str, arguments: dict, context: ToolContext) -> _Answer:
        store = self._store if tool.options.cache == "disk" else None
        if store is not None:
            found = store.get(key)
            if found is not None and self._is_fresh(tool, found[1]):
                return _Answer(Outcome.OK, found[0], 0.0, 0.0, cache="disk", made=found[1])
        answer = replace(await self._attempts(tool, arguments, context), cache="made")
        answer = replace(answer, made=answer.ended)
        if store is not None and answer.outcome is Outcome.OK:
            await asyncio.to_thread(store.put, key, answer.text, answer.made)
        return answer

    def _is_fresh(self, tool: Tool, made: float) -> bool:
        ttl = tool.options.cache_ttl
        return ttl is None or self._clock() - made < ttl

    async def _attempts(self, tool: Tool, arguments: dict, context: ToolContext) -> _Answer:
        """Try, and try again as often as the tool allows after a timeout or an infrastructure failure."""
        lane = self._lane(tool, context)
        attempt = await lane.attempt(arguments, context)
        started = attempt.started
        for retry in range(tool.options.retries):
            if attempt.outcome not in RETRYABLE:
                break
            pause = min(tool.options.backoff * 2**retry, MAX_BACKOFF_S)
            await asyncio.sleep(pause * self._jitter.uniform(0.5, 1.0))
            attempt = await lane.attempt(arguments, context)
        return self._answer(tool, attempt, started)

    def _answer(self, tool: Tool, attempt: Attempt, started: float | None) -> _Answer:
        budget = tool.options.max_output_tokens or self._max_output_tokens
        text = cut_to_budget(attempt.text, budget, self._count_tokens, tool.options.keep)
        return _Answer(attempt.outcome, text, attempt.ended if started is None else started, attempt.ended)

    def _refused(self, outcome: Outcome, text: str) -> _Answer:
        now = self._clock()
        text = cut_to_budget(text, self._max_output_tokens, self._count_tokens)
        return _Answer(outcome, text, now, now)


def _unknown(name: str, tools: Collection[str]) -> str:
    near = difflib.get_close_matches(name, tools, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"there is no tool {name!r}{hint} The tools are: {', '.join(tools) or 'none'}"
