"""A connection's incoming messages, watched for their end.

A session of the SDK whose server has died stays open and answers every call with "Connection closed"; the
end of its messages is the one sign of that between calls. Used by `toolcall.mcp.client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from mcp.client import Transport


@asynccontextmanager
async def watched(transport: Transport, on_end: Callable[[], None]) -> AsyncIterator[Any]:
    """The transport; `on_end` is called when no message will come any more."""
    async with transport as (received, sent):
        yield _Watched(received, on_end), sent


class _Watched:
    """A read stream of the SDK, passed through."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except Exception:
            self._on_end()
            raise

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except Exception:  # StopAsyncIteration is one
            self._on_end()
            raise

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._stream.__aexit__(*raised)
