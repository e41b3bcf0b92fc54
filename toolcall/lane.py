"""One tool's lane: its slots, its breaker, and the calls it had to leave behind.

Invariant: an attempt ends within the tool's queue_timeout + its timeout + a second, as an `Attempt`, and a
slot is free again when its attempt ends. A call that outlives its deadline (a hung thread, a coroutine that
ignores cancellation) keeps no slot; it is counted, and after `max_left_behind` of them the tool is refused
until some end. So a tool that hangs can hurt only itself. Made and called by the executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolcall.breaker import Breaker
from toolcall.errors import ToolError, ToolUnavailable
from toolcall.output import to_text
from toolcall.registry import Tool
from toolcall.run_limits import RunRate, RunSlots
from toolcall.types import Outcome, ToolContext
from toolcall.work import SelfCancelled, Work, finish, start

RETRYABLE = (Outcome.TIMEOUT, Outcome.INFRASTRUCTURE)


@dataclass(frozen=True)
class Limits:
    """The executor's bounds on every tool's lane."""

    max_left_behind: int = 16  # calls of one tool still running after their deadline
    down_share: float = 0.5  # of a tool's last calls failing by infrastructure: it is down


@dataclass(frozen=True)
class Attempt:
    """How one try ended. Times are the executor's clock; `started` is None if it never ran."""

    outcome: Outcome
    text: str
    started: float | None
    ended: float


class Lane:
    """shared: the folder in which the actors of a run keep their common limits; None: this process alone."""

    def __init__(
        self,
        tool: Tool,
        limits: Limits,
        shared: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        options = tool.options
        self._tool = tool
        self._limits = limits
        self._clock = clock
        self._run_slots: RunSlots | None = None
        here = options.max_concurrency
        if options.run_concurrency is not None and shared is not None:
            self._run_slots = RunSlots(shared, tool.name, options.run_concurrency)
        elif options.run_concurrency is not None:
            here = min(here, options.run_concurrency)
        self._slots = asyncio.Semaphore(here)
        self._rate = RunRate(shared, tool.name, options.rate_limit, clock) if options.rate_limit else None
        self._breaker = Breaker(options.breaker_threshold, options.breaker_cooldown)
        self._left_behind: list[Work] = []
        self._running = 0
        self._most_running = 0

    def take_most_running(self) -> int:
        """Calls at once since the last call of this."""
        most, self._most_running = self._most_running, self._running
        return most

    def close(self) -> None:
        if self._run_slots is not None:
            self._run_slots.close()

    def recovered(self) -> None:
        """A probe has found that what is behind the tool is there again."""
        self._breaker.succeeded()

    async def attempt(self, arguments: dict, context: ToolContext) -> Attempt:
        """Wait for a slot, then run the tool once with validated arguments."""
        if self._run_slots is None and self._rate is None and not self._slots.locked():
            async with self._slots:  # free: there is no wait to bound
                return self._refusal() or await self._run(arguments, context)
        longest = self._tool.options.queue_timeout
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(longest):
                    await self._admit(held)
            except TimeoutError:
                return self._not_run(
                    Outcome.INFRASTRUCTURE,  # too little of the tool for this run: not the model's fault
                    f"{self._tool.name} was busy for {longest:g} s, so the call did not run",
                )
            return self._refusal() or await self._run(arguments, context)

    async def _admit(self, held: AsyncExitStack) -> None:
        """Take a slot of this executor, one of the run, and the run's next free moment."""
        await held.enter_async_context(self._slots)
        if self._run_slots is not None:
            await held.enter_async_context(self._run_slots.hold())
        if self._rate is not None:
            wait = self._rate.reserve(self._tool.options.queue_timeout)
            if wait is None:
                raise TimeoutError
            await asyncio.sleep(wait)

    def _refusal(self) -> Attempt | None:
        if self._left_behind:
            self._left_behind = [work for work in self._left_behind if work.running()]
        if len(self._left_behind) >= self._limits.max_left_behind:
            return self._not_run(
                Outcome.INFRASTRUCTURE,
                f"{self._tool.name} is unavailable: {len(self._left_behind)} of its calls never came back",
            )
        if not self._breaker.permits(asyncio.get_running_loop().time()):
            return self._not_run(
                Outcome.BREAKER_OPEN,
                f"{self._tool.name} is unavailable: its last {self._breaker.failures} calls failed",
            )
        return None

    async def _run(self, arguments: dict, context: ToolContext) -> Attempt:
        started = self._clock()
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        try:
            outcome, text = Outcome.OK, to_text(await self._value(arguments, context))
        except SelfCancelled:
            outcome, text = Outcome.CANCELLED, f"{self._tool.name} cancelled itself"
        except asyncio.CancelledError:
            self._breaker.undecided()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            outcome, text = self._failure(error)
        finally:
            self._running -= 1
        self._tell_breaker(outcome)
        return Attempt(outcome, text, started, self._clock())

    async def _value(self, arguments: dict, context: ToolContext) -> Any:
        """What the function, or the method of the trajectory's object, returns within its deadline."""
        tool = self._tool
        if tool.owner is None:
            return await self._finish(self._start(tool.bind(arguments, context)))
        instance = await tool.owner.instance(context, self._left_behind.append)
        call = tool.bind(arguments, context, instance.object)
        if tool.is_async:
            return await self._finish(self._start(call))
        async with instance.alone():
            instance.last = self._start(call)
            return await self._finish(instance.last)

    def _start(self, call: Callable[[], Any]) -> Work:
        return start(call, self._tool.is_async, f"tool {self._tool.name}")

    async def _finish(self, work: Work) -> Any:
        try:
            return await finish(work, self._tool.options.timeout)
        finally:
            if work.running():
                self._left_behind.append(work)

    def _failure(self, error: Exception) -> tuple[Outcome, str]:
        if isinstance(error, TimeoutError):
            reason = str(error) or "no answer in time"
            return Outcome.TIMEOUT, f"{self._tool.name} timed out ({reason}){self._unknown_outcome()}"
        if isinstance(error, ToolUnavailable | ConnectionError):
            reason = str(error) or type(error).__name__
            return (
                Outcome.INFRASTRUCTURE,
                f"{self._tool.name} is unavailable ({reason}){self._unknown_outcome()}",
            )
        message = str(error)
        if not message or not isinstance(error, ToolError | ValueError):
            message = f"{type(error).__name__}: {message}".removesuffix(": ")
        return Outcome.TOOL_ERROR, to_text(message)

    def _unknown_outcome(self) -> str:
        if self._tool.options.idempotent:
            return ""
        return "; it may or may not have taken effect, the outcome is unknown, and it was not retried"

    def _tell_breaker(self, outcome: Outcome) -> None:
        if outcome in RETRYABLE:
            self._breaker.failed(asyncio.get_running_loop().time())
        elif outcome is Outcome.CANCELLED:
            self._breaker.undecided()
        else:
            self._breaker.succeeded()

    def _not_run(self, outcome: Outcome, text: str) -> Attempt:
        return Attempt(outcome, text, None, self._clock())
