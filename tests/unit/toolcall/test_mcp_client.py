"""Sessions with an MCP server: shared, lost, replaced, closed. The server is the SDK's, in the same loop."""

from __future__ import annotations

import asyncio
import logging

import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError as ServersToolError
from mcp.shared.exceptions import MCPError

from tests.unit.toolcall.mcp_servers import FakeEndpoint
from tests.unit.toolcall.support import loop_time, run_virtual
from toolcall.errors import ToolError, ToolUnavailable
from toolcall.mcp.client import MAX_PAUSE_S, PROBE_TIMEOUT_S, McpClient


class Listing(MCPServer):
    """Lists its tools when `answers` is set."""

    def __init__(self) -> None:
        super().__init__("town")
        self.answers = asyncio.Event()
        self.answers.set()

    async def list_tools(self, *arguments, **options):
        await self.answers.wait()
        return await super().list_tools(*arguments, **options)


class Town:
    """A server whose tools wait for the test."""

    def __init__(self) -> None:
        self.waiting = 0
        self.go = asyncio.Event()
        self.server = Listing()
        self.server.add_tool(self.echo)
        self.server.add_tool(self.wait)
        self.server.add_tool(self.refuse)
        self.server.add_tool(self.broken)
        self.server.add_tool(self.logout)

    async def echo(self, text: str) -> str:
        return text

    async def wait(self, text: str) -> str:
        self.waiting += 1
        await self.go.wait()
        return text

    async def refuse(self) -> str:
        raise ServersToolError("the museum is closed")

    async def logout(self) -> str:
        self.waiting += 1
        raise MCPError(-32600, "session of the user not found")

    async def broken(self) -> str:
        raise MCPError(-32099, "no such street")


async def until(condition) -> None:
    """In virtual time."""
    async with asyncio.timeout(1000):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


def client_of(town: Town, schemas=None, one_session=False, **config) -> tuple[FakeEndpoint, McpClient]:
    end = FakeEndpoint(town.server, **config)
    return end, McpClient(end, schemas or {}, one_session=one_session)


def test_calls_of_many_tasks_share_one_session_and_run_at_once():
    async def body():
        town = Town()
        end, client = client_of(town)
        calls = [asyncio.create_task(client.call("wait", {"text": str(i)})) for i in range(20)]
        await until(lambda: town.waiting == 20)
        assert end.connections == 1
        town.go.set()
        assert await asyncio.gather(*calls) == [str(i) for i in range(20)]
        await client.close()
        assert end.open == 0

    run_virtual(body())


def test_a_server_that_refuses_is_a_tool_error_and_its_session_stays():
    async def body():
        town = Town()
        end, client = client_of(town)
        with pytest.raises(ToolError, match="the museum is closed"):
            await client.call("refuse", {})
        with pytest.raises(ToolError, match="no such street"):
            await client.call("broken", {})
        with pytest.raises(ToolError, match="session of the user not found"):
            await client.call("logout", {})
        assert town.waiting == 1
        with pytest.raises(ToolError, match="Unknown tool: fly"):
            await client.call("fly", {})
        assert await client.call("echo", {"text": "a"}) == "a"
        assert end.connections == 1

    run_virtual(body())


def test_c14_pending_calls_fail_and_later_ones_work_when_the_server_dies_and_comes_back():
    async def body():
        town = Town()
        end, client = client_of(town)
        pending = [asyncio.create_task(client.call("wait", {"text": "x"})) for _ in range(3)]
        await until(lambda: town.waiting == 3)
        await end.die()
        for call in pending:
            with pytest.raises(ToolUnavailable, match="MCP server 'town': Connection closed"):
                await call
        assert await client.call("echo", {"text": "again"}) == "again"
        assert end.connections == 2 and end.open == 1

    run_virtual(body())


def test_c14_a_server_that_dies_between_calls_is_replaced_before_the_next():
    async def body():
        end, client = client_of(Town())
        await client.call("echo", {"text": "a"})
        await end.die()
        await until(lambda: end.connections == 2)
        assert await client.call("echo", {"text": "b"}) == "b"

    run_virtual(body())


def test_c14_calls_wait_for_a_server_that_is_away_for_a_moment():
    async def body():
        end, client = client_of(Town(), connect_timeout_s=20)
        await client.call("echo", {"text": "a"})
        end.down = True
        await end.die()
        await until(lambda: end.open == 0)
        call = asyncio.create_task(client.call("echo", {"text": "b"}))
        await until(lambda: end.connections >= 4)
        end.down = False
        assert await call == "b"

    run_virtual(body())


def test_c14_calls_of_a_server_that_stays_away_say_why_within_their_patience():
    async def body():
        end, client = client_of(Town(), connect_timeout_s=20, timeout_s=10)
        end.down = True
        started = loop_time()
        with pytest.raises(ToolUnavailable, match=r"MCP server 'town' is down \(connection refused\)"):
            await client.call("echo", {"text": "a"})
        assert loop_time() - started == pytest.approx(8)

    run_virtual(body())


def test_c14_the_pauses_between_attempts_grow_to_a_bound_and_an_answer_ends_them():
    async def body():
        end, client = client_of(Town())
        end.down = True
        with pytest.raises(ToolUnavailable):
            await client.call("echo", {"text": "a"})
        await asyncio.sleep(1100 * MAX_PAUSE_S)  # a server that is away for a night
        before = end.connections
        await asyncio.sleep(10 * MAX_PAUSE_S)
        assert 9 <= end.connections - before <= 21
        end.down = False
        await until(lambda: end.open == 1)
        await client.call("echo", {"text": "a"})
        await end.die()
        started = loop_time()
        await until(lambda: end.open == 0)
        await until(lambda: end.open == 1)
        assert loop_time() - started < 1

    run_virtual(body())


def test_c14_a_server_that_hangs_is_replaced_after_a_call_and_a_probe_without_an_answer():
    async def body():
        town = Town()
        end, client = client_of(town)
        await client.call("echo", {"text": "a"})
        town.server.answers.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await client.call("wait", {"text": "a"})
        await asyncio.sleep(PROBE_TIMEOUT_S - 1)
        assert (end.connections, end.open) == (1, 1)
        await until(lambda: end.open == 0)
        town.server.answers.set()
        assert await client.call("echo", {"text": "b"}) == "b"
        assert end.connections == 2

    run_virtual(body())


def test_c14_a_probe_tells_whether_the_server_is_there():
    async def body():
        end, client = client_of(Town(), connect_timeout_s=5)
        await client.probe()
        end.down = True
        await end.die()
        await until(lambda: end.open == 0)
        with pytest.raises(ToolUnavailable, match="is down"):
            await client.probe()
        end.down = False
        await until(lambda: end.open == 1)
        await client.probe()

    run_virtual(body())


def test_a_slow_call_that_was_given_up_leaves_the_session_of_the_others_alone():
    async def body():
        town = Town()
        end, client = client_of(town)
        other = asyncio.create_task(client.call("wait", {"text": "other"}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await client.call("wait", {"text": "a"})
        await asyncio.sleep(2 * PROBE_TIMEOUT_S)
        town.go.set()
        assert await other == "other" and end.connections == 1

    run_virtual(body())


def test_a_session_of_one_trajectory_is_not_replaced():
    async def body():
        end, client = client_of(Town(), one_session=True)
        await client.call("echo", {"text": "a"})
        await end.die()
        await until(lambda: end.open == 0)
        with pytest.raises(ToolUnavailable, match="is gone, and this trajectory's state with it"):
            await client.call("echo", {"text": "b"})
        assert end.connections == 1

    run_virtual(body())


def test_a_session_of_one_trajectory_may_need_a_second_attempt_to_open():
    async def body():
        end, client = client_of(Town(), one_session=True)
        end.down = True
        call = asyncio.create_task(client.call("echo", {"text": "a"}))
        await until(lambda: end.connections == 1)
        end.down = False
        assert await call == "a"

    run_virtual(body())


def test_a_client_is_closed_from_another_task_and_opens_again_when_called():
    async def body():
        end, client = client_of(Town())
        await asyncio.create_task(client.call("echo", {"text": "a"}))
        await asyncio.create_task(client.close())
        assert end.open == 0
        assert await client.call("echo", {"text": "b"}) == "b"
        await client.close()
        assert (end.connections, end.open) == (2, 0)

    run_virtual(body())


def test_a_session_ends_with_its_loop_and_the_client_works_in_the_next():
    town = Town()
    end, client = client_of(town)
    for _ in range(2):
        assert run_virtual(client.call("echo", {"text": "a"})) == "a"
        assert end.open == 0


def test_a_cancelled_call_does_not_disturb_one_that_waits_for_the_same_connection():
    async def body():
        end, client = client_of(Town())
        first, second = (asyncio.create_task(client.call("echo", {"text": text})) for text in "ab")
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "b" and end.connections == 1

    run_virtual(body())


def test_tools_that_changed_are_reported_once_and_kept(caplog):
    async def body():
        _, client = client_of(Town(), schemas={"echo": {"type": "object"}, "fly": {}})
        assert await client.call("echo", {"text": "a"}) == "a"

    with caplog.at_level(logging.WARNING):
        run_virtual(body())
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "MCP server 'town' offers other tools than before: echo, fly; the model is still"
    )
