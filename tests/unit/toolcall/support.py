"""A virtual clock for the executor's tests: an event loop whose time jumps to the next timer.

A tool that hangs for an hour costs the test nothing and ends exactly at its deadline. Tools that run in
threads cannot be tested on it (time would jump while the thread works): those tests use real, short limits.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from toolcall import Executor, Tool, ToolCall, ToolContext, ToolResult
from toolcall.types import ParsedTurn, ParseFailure

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jumped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the test would wait for ever"
            self.jumped += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def turn(*calls: tuple[str, dict[str, Any]] | ParseFailure) -> ParsedTurn:
    """A parsed turn with calls `(tool name, arguments)` and ids call_0, call_1, …"""
    return ParsedTurn(
        tuple(
            call if isinstance(call, ParseFailure) else ToolCall(f"call_{number}", *call)
            for number, call in enumerate(calls)
        )
    )


async def run_one(executor: Executor, tool: Tool, **arguments: Any) -> ToolResult:
    (result,) = await executor.run(turn((tool.name, arguments)), ToolContext())
    return result


def executor_for(*tools: Tool, clock: Callable[[], float] = loop_time, **options: Any) -> Executor:
    return Executor(tools, clock=clock, **options)
