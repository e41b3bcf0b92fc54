"""The objects behind class tools: one for each trajectory, made at the first call, closed at the end.

Invariant: an object whose class has tools belongs to one trajectory; its `setup` runs once before its first
method, and its `close` runs exactly once after, whatever setup or a method raised. Synchronous methods of
one object run one at a time, since they run in threads; async ones side by side.
Called by `toolcall.lane`; the trajectory's `context.resources` does the closing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from toolcall.errors import BadTool, ToolError
from toolcall.types import ToolContext
from toolcall.work import DeadlineExceeded, Work, finish, start

CLOSE_TIMEOUT_S = 10.0
LIFECYCLE = ("setup", "close")  # never tools


@dataclass(eq=False)
class Instance:
    """One trajectory's object. `last` is its newest method in a thread, which may outlive its deadline."""

    object: Any
    last: Work | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """For a synchronous method: after those before it, and not beside one that never came back."""
        async with self._lock:
            if self.last is not None and self.last.running():
                raise ToolError("an earlier call on the same object has not come back")
            yield


class ToolClass:
    """A class with tools, and how its objects begin and end."""

    def __init__(self, cls: type, setup_timeout: float) -> None:
        self.cls = cls
        self.setup_timeout = setup_timeout
        for name in LIFECYCLE:
            _refuse_lifecycle(cls, name)

    async def instance(self, context: ToolContext, left_behind: Callable[[Work], None]) -> Instance:
        """This trajectory's object, set up. Raises what its constructor or `setup` raised, or TimeoutError;
        then the next call makes another. left_behind: told of a `setup` that outlives its deadline."""
        ready = context.instances.get(self)
        if ready is None or _failed(ready):
            instance = Instance(self.cls())
            setting_up = self._set_up(instance, context, left_behind)
            ready = context.instances[self] = asyncio.create_task(setting_up)
            context.resources.push_async_callback(self._end, instance, ready)
        return await asyncio.shield(ready)  # calls of one turn share it

    async def _set_up(
        self, instance: Instance, context: ToolContext, left_behind: Callable[[Work], None]
    ) -> Instance:
        setup = getattr(instance.object, "setup", None)
        if setup is None:
            return instance
        takes_context = len(inspect.signature(setup).parameters) == 1
        call = functools.partial(setup, context) if takes_context else setup
        work = start(call, inspect.iscoroutinefunction(setup), f"tool {self.cls.__name__}.setup")
        try:
            await finish(work, self.setup_timeout)
        finally:
            if work.running():
                left_behind(work)
        return instance

    async def _end(self, instance: Instance, ready: asyncio.Future[Any]) -> None:
        ready.cancel()
        await asyncio.wait({ready})  # ends soon: `finish` bounds it
        close = getattr(instance.object, "close", None)
        if close is not None:
            try:
                work = start(close, inspect.iscoroutinefunction(close), f"tool {self.cls.__name__}.close")
                await finish(work, CLOSE_TIMEOUT_S)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{self.cls.__name__}.close: {error}") from None


def _failed(ready: asyncio.Future[Any]) -> bool:
    return ready.done() and (ready.cancelled() or ready.exception() is not None)


def _refuse_lifecycle(cls: type, name: str) -> None:
    """`setup(self)` or `setup(self, context)`, and `close(self)`."""
    method = getattr(cls, name, None)
    if method is None:
        return
    most = 2 if name == "setup" else 1
    if not inspect.isfunction(method) or not 1 <= len(inspect.signature(method).parameters) <= most:
        wanted = "setup(self, context)" if name == "setup" else "close(self)"
        raise BadTool(f"tool class {cls.__name__}: {name} must be a method {wanted}")
