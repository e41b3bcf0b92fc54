"""One MCP server as the tools that call it see it: one session at a time, replaced when it is lost.

Invariant: sessions are opened, watched and closed by one task, the keeper, since the SDK allows no other to
close them; calls come from any number of tasks and share the session. A call ends with the server's answer,
or raises ToolUnavailable (the server is gone), ToolError (it refused the call) or TimeoutError; how long it
may take is the caller's deadline, `toolcall.lane`'s. A session ends by `close`, or with the event loop in
which it was opened.

When a session is lost, calls in flight fail, later ones wait for the next session. Servers die in three ways:
their messages end; a connection fails; or nothing comes any more, which a call without an answer makes the
keeper ask after. Made by `toolcall.mcp.loading`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, TextIO, cast

from mcp import Client
from mcp.client import Transport
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    Tool,
    ToolListChangedNotification,
)
from pydantic import ValidationError

from configs.mcp_servers import McpConfig
from toolcall.errors import ToolError, ToolUnavailable
from toolcall.mcp.content import to_text
from toolcall.mcp.streams import watched

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # before a lost session is replaced; doubles while sessions end without one answer
MAX_PAUSE_S = 30.0
PROBE_TIMEOUT_S = 10.0  # for a server that left a call unanswered to list its tools
CLOSE_TIMEOUT_S = 10.0  # the SDK gives a program 2 s to end by itself, 2 s after SIGTERM, then SIGKILL
DRAIN_TIMEOUT_S = 5.0  # for the calls of a lost session to end by themselves
MAX_PAGES = 100  # of a list of tools
_UNKNOWN_SESSION = -32001  # of servers made with the TypeScript SDK
_SESSION_GONE = re.compile(r"session.*(not found|terminated|expired)", re.IGNORECASE)
_NO_ANSWER = "Server returned an error response"  # the SDK's text for an HTTP error without a JSON-RPC body


class Endpoint(Protocol):
    """What a client needs of `toolcall.mcp.server.Server`."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> McpConfig: ...
    def transport(self, errors: TextIO) -> Transport: ...


class McpClient:
    """schemas: of the tools that will be called, by the server's name for them, to notice changes.

    one_session: a lost session is not replaced, because the server's state went with it.
    """

    def __init__(self, server: Endpoint, schemas: Mapping[str, Any], *, one_session: bool = False) -> None:
        self._server = server
        self._schemas = schemas
        self._one_session = one_session
        self._keeper: asyncio.Task[None] | None = None
        self._session: Client | None = None
        self._in_flight = 0  # calls, all of the same session
        # Events of the loop that the keeper runs in: there is a session; the keeper should look after it;
        # no call is in flight.
        self._opened, self._wake, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._lost = ""  # why the session is known to be gone, or the last one was
        self._fruitless = 0  # sessions in a row that ended without an answer to a call

    async def call(self, name: str, arguments: dict[str, Any]) -> str | None:
        """The answer as text. Raises ToolError, ToolUnavailable or TimeoutError."""
        try:
            result = await self._call(name, arguments)
        except MCPError as error:
            if not self._forgotten(error):
                raise self._explained(error) from error
            result = await self._call_again(name, arguments)
        self._fruitless = 0
        return to_text(result)

    async def probe(self) -> None:
        """Raises ToolUnavailable if the server is not there."""
        session = await self._current()
        try:
            await session.list_tools()
        except MCPError as error:
            self._wake.set()
            raise self._explained(error) from error

    async def close(self) -> None:
        """End the session; calls in flight fail. From any task of the loop that it was opened in."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=CLOSE_TIMEOUT_S)

    # --- calls -------------------------------------------------------------------------------------

    async def _call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        session = await self._current()
        self._in_flight += 1
        self._quiet.clear()
        try:
            return await session.call_tool(name, arguments)
        except MCPError as error:
            if self._forgotten(error) and self._session is session:
                self._ended(error.message)
            self._wake.set()
            raise
        except asyncio.CancelledError:  # the deadline of the call, perhaps
            self._wake.set()
            raise
        except (RuntimeError, ValidationError) as error:  # it breaks MCP, or the tool's own output schema
            raise ToolError(f"the server's answer is not valid: {in_words(error)}") from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._quiet.set()

    async def _call_again(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The server has forgotten the session, so it has not run the call: ask once more in a new one."""
        try:
            return await self._call(name, arguments)
        except MCPError as error:
            raise self._explained(error) from error

    async def _current(self) -> Client:
        """The session, or the next one if it comes soon enough to leave time for the call."""
        if self._keeper is None or self._keeper.done():
            if self._keeper is not None and self._one_session:
                raise ToolUnavailable(f"{self._title} is gone, and this trajectory's state with it")
            self._opened, self._wake, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(), name=self._title)
        config = self._server.config
        try:
            async with asyncio.timeout(min(config.connect_timeout_s, 0.8 * config.timeout_s)):
                while self._session is None:
                    await self._opened.wait()
        except TimeoutError:
            raise ToolUnavailable(f"{self._title} is down ({self._lost or 'it has not answered'})") from None
        return self._session

    def _forgotten(self, error: MCPError) -> bool:
        """The transport's own refusal, not an error that a tool about sessions may give."""
        refused = error.code in (INVALID_REQUEST, _UNKNOWN_SESSION) and bool(self._server.config.url)
        return refused and _SESSION_GONE.search(error.message) is not None

    def _explained(self, error: MCPError) -> Exception:
        if error.code == REQUEST_TIMEOUT:
            return TimeoutError(error.message)
        unanswered = error.code in (CONNECTION_CLOSED, METHOD_NOT_FOUND, PARSE_ERROR)
        if unanswered or (error.code == INTERNAL_ERROR and error.message == _NO_ANSWER):
            return ToolUnavailable(f"{self._title}: {error.message}")
        return ToolError(error.message)

    # --- the keeper --------------------------------------------------------------------------------

    async def _keep(self) -> None:
        opened = False
        while True:
            try:
                async with AsyncExitStack() as stack:
                    session = await self._open(stack)
                    opened = True
                    await self._attend(session)
            except Exception as error:  # noqa: BLE001 - whatever ends a session, the next is tried
                self._lost = in_words(error)
            logger.warning("%s is gone: %s", self._title, self._lost)
            if opened and self._one_session:
                return
            await asyncio.sleep(self._pause_s() * random.uniform(0.5, 1.0))
            self._fruitless += 1

    def _pause_s(self) -> float:
        doublings = min(self._fruitless, 20)  # a power of any number would overflow after some hours
        return min(FIRST_PAUSE_S * 2**doublings, MAX_PAUSE_S)

    async def _open(self, stack: AsyncExitStack) -> Client:
        """Within the deadline, or TimeoutError."""
        self._wake.clear()
        self._lost = ""
        end = self._server
        try:
            async with asyncio.timeout(end.config.connect_timeout_s):
                session = await stack.enter_async_context(self._new_client())
                self._compare(await all_tools(session))
        except TimeoutError:
            raise TimeoutError(no_answer(end.name, end.config)) from None
        return session

    async def _attend(self, session: Client) -> None:
        """Offer the session to calls until it is lost; raises why."""
        self._session = session
        self._opened.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._lost:
                    await self._calls_ended()
                    raise ConnectionError(self._lost)
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await session.list_tools()
        except TimeoutError:
            raise TimeoutError(f"a call and then a probe of {PROBE_TIMEOUT_S:g} s had no answer") from None
        finally:
            self._withdraw()

    async def _calls_ended(self) -> None:
        """A server that has forgotten a session tells each call so, if the session stays for it to hear."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while self._in_flight:
                    await self._quiet.wait()

    def _withdraw(self) -> None:
        """Offer the session to no more calls."""
        self._session = None
        self._opened.clear()

    def _ended(self, reason: str = "the server closed the connection") -> None:
        self._withdraw()
        self._lost = self._lost or reason
        self._wake.set()

    def _new_client(self) -> Client:
        transport = watched(self._server.transport(cast(TextIO, sys.__stderr__)), self._ended)
        return Client(transport, cache=None, message_handler=self._heard)

    async def _heard(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            logger.warning("%s says that its tools have changed; %s", self._title, _KEPT)

    def _compare(self, offered: list[Tool]) -> None:
        now = {tool.name: tool.input_schema for tool in offered}
        changed = [name for name, schema in self._schemas.items() if now.get(name) != schema]
        if changed:
            logger.warning(
                "%s offers other tools than before: %s; %s", self._title, ", ".join(changed), _KEPT
            )

    @property
    def _title(self) -> str:
        return f"MCP server {self._server.name!r}"


_KEPT = "the model is still shown those from the start of this process"


def no_answer(name: str, config: McpConfig) -> str:
    return f"no answer within task.mcp.{name}.connect_timeout_s = {config.connect_timeout_s:g}"


async def all_tools(client: Client) -> list[Tool]:
    """The server's tools, page by page."""
    page = await client.list_tools()
    tools = list(page.tools)
    for _ in range(MAX_PAGES):
        if page.next_cursor is None:
            break
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def in_words(error: BaseException) -> str:
    """The first cause in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
