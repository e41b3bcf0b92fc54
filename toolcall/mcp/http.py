"""The HTTP client of an MCP session, in which a broken connection fails the one call that used it.

The SDK ends a session, and every call in flight with it, when any request raises: a connection was reset, or
the server closed it for being idle just as it was used. Here such a request is answered with an error of
JSON-RPC instead, and the session's keeper finds out if the server is gone. Used by `toolcall.mcp.server`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from mcp_types import CONNECTION_CLOSED

_SERVICE_UNAVAILABLE = 503


class OneByOneClient(httpx2.AsyncClient):
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if request.method != "POST":  # no call: the SDK copes
            return await super().send(request, **options)
        try:
            response = await super().send(request, **options)
        except httpx2.TransportError as error:
            refusal = {"code": CONNECTION_CLOSED, "message": _in_words(error)}
            body = {"jsonrpc": "2.0", "id": None, "error": refusal}
            return httpx2.Response(_SERVICE_UNAVAILABLE, json=body, request=request)
        if not response.is_closed:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Body(response.stream)
        return response


class _Body(httpx2.AsyncByteStream):
    """A response's body, whose end before its time is an error that the SDK expects of a body."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._stream:
                yield part
        except httpx2.TransportError as error:
            raise httpx2.StreamError(_in_words(error)) from error

    async def aclose(self) -> None:
        with contextlib.suppress(httpx2.TransportError):
            await self._stream.aclose()


def _in_words(error: httpx2.TransportError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
