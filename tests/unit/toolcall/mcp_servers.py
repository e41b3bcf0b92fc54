"""A server of the SDK inside the test's own event loop, which can die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TextIO

from mcp.client import Transport
from mcp.server import MCPServer
from mcp.shared.memory import create_client_server_memory_streams

from configs.mcp_servers import McpConfig


class FakeEndpoint:
    """What `toolcall.mcp.client.McpClient` needs of a server's configuration.

    `die` ends the open connection; while `down` is set, new ones are refused; while `mute`, nothing that
    the server sends arrives.
    """

    name = "town"

    def __init__(self, server: MCPServer, **config: Any) -> None:
        self.server = server
        self.config = McpConfig(command="town", **config)
        self.connections = 0
        self.open = 0
        self.down = False
        self._streams: list[Any] = []

    def transport(self, errors: TextIO) -> Transport:
        return self._connect()

    async def die(self) -> None:
        for stream in self._streams:
            await stream.aclose()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        self.connections += 1
        if self.down:
            raise ConnectionRefusedError("connection refused")
        self.open += 1
        async with create_client_server_memory_streams() as (client_streams, server_streams):
            self._streams = list(server_streams)
            low = self.server._lowlevel_server  # pyright: ignore[reportPrivateUsage]
            serving = asyncio.create_task(low.run(*server_streams, low.create_initialization_options()))
            try:
                yield client_streams
            finally:
                await client_streams[1].aclose()
                serving.cancel()
                await asyncio.wait({serving}, timeout=5)
                self.open -= 1
