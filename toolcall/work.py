"""Running one coroutine or one blocking function under a deadline that holds.

Invariant: `finish` returns or raises within its timeout plus `GRACE_S`, whatever the work does: a coroutine
that swallows its cancellation and a function that hangs in C code are left behind, not waited for.

Blocking functions get a daemon thread of their own rather than a slot of a shared pool, so one that hangs
can take nothing away from others and cannot keep the process alive at exit; who starts them bounds their
number (`toolcall.lane` counts the ones left behind). Called by `toolcall.lane` and `tasks.scoring`; `run` by
mains of processes that call tools.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

GRACE_S = 1.0  # for a cancelled coroutine to clean up

Result = TypeVar("Result")
_deaf: list[Any] = []  # tasks that `run` has left behind: to forget one would wake it once more


class DeadlineExceeded(TimeoutError):
    """The work did not end in time; it was cancelled or left behind."""


class SelfCancelled(Exception):
    """The work raised CancelledError although nobody cancelled it (a cancel scope of its own, say)."""


@dataclass(frozen=True)
class Work:
    """Something running. `running` is True until it has really ended, even after its future was cancelled."""

    future: asyncio.Future[Any]
    running: Callable[[], bool]


def start(fn: Callable[[], Any], is_async: bool, name: str = "tool") -> Work:
    """Begin to run `fn`: as a task, or in a thread if it is not async. `name`: of the task or thread, for
    whoever asks what the process is busy with."""
    return _start_task(fn, name) if is_async else _start_thread(fn, name)


async def finish(work: Work, timeout_s: float) -> Any:
    """The work's value. Raises what it raised, SelfCancelled or DeadlineExceeded; cancelled with us."""
    try:
        await asyncio.wait({work.future}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _cancel(work)
        raise
    if not work.future.done():
        await _cancel(work)
        raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
    if work.future.cancelled():
        raise SelfCancelled("cancelled itself")
    return work.future.result()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run, but what swallows its cancellation is left behind at the end too."""

    async def contained() -> Result:
        try:
            return await main
        finally:
            await _leave_behind(asyncio.all_tasks() - {asyncio.current_task()})

    return asyncio.run(contained())


async def _leave_behind(tasks: set[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        _, deaf = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in deaf:
            asyncio.tasks._unregister_task(task)  # else asyncio.run waits for it, for ever
        _deaf.extend(deaf)


async def _cancel(work: Work) -> None:
    work.future.cancel()
    await asyncio.wait({work.future}, timeout=GRACE_S)
    if work.future.done() and not work.future.cancelled():
        work.future.exception()  # too late to matter; reading it keeps asyncio from warning


def _start_task(fn: Callable[[], Awaitable[Any]], name: str) -> Work:
    async def contained() -> Any:
        try:
            return await fn()
        except SystemExit as error:  # asyncio would end the whole process with it
            raise RuntimeError(f"tried to exit the process ({error})") from error

    task = asyncio.create_task(contained(), name=name)
    return Work(task, lambda: not task.done())


def _start_thread(fn: Callable[[], Any], name: str) -> Work:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if future.done():
            return  # past its deadline
        if error is None:
            future.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # would end the event loop or confuse the future
            future.set_exception(RuntimeError(f"raised {type(error).__name__}: {error}".removesuffix(": ")))

    ended = threading.Event()  # not the thread's own end, which comes a moment after the value is there

    def target() -> None:
        value, error = None, None
        try:
            value = fn()
        except BaseException as caught:  # noqa: BLE001 - handed to the waiting coroutine
            error = caught
        ended.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target,), daemon=True, name=name)
    thread.start()
    return Work(future, lambda: not ended.is_set())
