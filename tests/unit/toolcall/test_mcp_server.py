"""Real servers over stdio and HTTP: environment, deaths, ends. Written by hand, so that they start fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs.mcp_servers import McpConfig
from tests.unit.toolcall.mcp_site import HandWrittenSite
from toolcall.errors import ToolUnavailable
from toolcall.mcp.client import McpClient
from toolcall.mcp.server import BadServer, Server

BY_HAND = Path(__file__).parents[2] / "mcp_by_hand.py"
PATIENCE_S = 60.0  # of a busy machine


def server(*options: str, **config) -> Server:
    config = {"command": "python", "args": [str(BY_HAND), *options], "connect_timeout_s": PATIENCE_S} | config
    return Server("town", McpConfig(**config), BY_HAND.parent)


async def ask(client: McpClient, tool: str, **arguments) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return str(await client.call(tool, arguments))


def with_client(end: Server, body):
    async def run():
        client = McpClient(end, {})
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


def gone(pids: list[int]) -> bool:
    """All have ended, waited for within the deadline. A zombie has."""

    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    for pid in pids:
        try:
            psutil.wait_procs([psutil.Process(pid)], timeout=PATIENCE_S)
        except psutil.NoSuchProcess:
            continue
    return all(map(ended, pids))


def test_a_program_gets_the_folder_and_the_variables_of_its_table_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWN_SECRET", "s3cret")
    monkeypatch.setenv("OTHER", "not for it")
    end = server(env={"TOKEN": "Bearer ${TOWN_SECRET}"})

    async def body(client):
        assert await ask(client, "getenv", name="TOKEN") == "Bearer s3cret"
        assert await ask(client, "getenv", name="OTHER") == ""
        path = await ask(client, "getenv", name="PATH")
        assert path.split(os.pathsep)[0] == str(Path(sys.executable).parent)

    with_client(end, body)


def test_c14_a_program_killed_in_the_middle_of_a_call_is_started_again():
    async def body(client):
        (first,) = json.loads(await ask(client, "pids"))
        with pytest.raises(ToolUnavailable, match="Connection closed"):
            await ask(client, "die")
        (second,) = json.loads(await ask(client, "pids"))
        os.kill(second, signal.SIGKILL)
        third = second
        while third == second:
            with contextlib.suppress(ToolUnavailable):  # the one call that is sent before the death shows
                (third,) = json.loads(await ask(client, "pids"))
        assert len({first, second, third}) == 3

    with_client(server(), body)


def test_a_program_that_ignores_the_end_of_its_input_is_killed_with_its_children_on_close():
    async def body(client):
        return json.loads(await ask(client, "pids"))

    pids = with_client(server("stay"), body)
    assert len(pids) == 2 and gone(pids)


CALLER = """
import asyncio, sys
from tests.unit.toolcall.test_mcp_server import ask, server
from toolcall.mcp.client import McpClient

async def main():
    print(await ask(McpClient(server("stay"), {}), "pids"), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_program_that_ignores_the_end_of_its_input_ends_with_a_caller_killed_by_kill_9():
    root = BY_HAND.parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", CALLER], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as caller:
        assert caller.stdout is not None
        pids = json.loads(caller.stdout.readline())
        caller.kill()
    assert len(pids) == 2 and gone(pids)


def over_http(site: HandWrittenSite, **config) -> Server:
    config = {"url": site.url, "connect_timeout_s": PATIENCE_S} | config
    return Server("town", McpConfig(**config), Path())


def test_headers_are_filled_in_and_sent_with_each_request(monkeypatch):
    monkeypatch.setenv("TOWN_TOKEN", "s3cret")
    with HandWrittenSite() as site:
        end = over_http(site, headers={"Authorization": "Bearer ${TOWN_TOKEN}"})

        async def body(client):
            assert await ask(client, "echo", text="a") == "a"

        with_client(end, body)
        assert {headers["Authorization"] for headers in site.headers} == {"Bearer s3cret"}
        assert "s3cret" not in repr(end)


def test_c14_a_session_that_an_http_server_has_forgotten_costs_no_call():
    with HandWrittenSite() as site:

        async def body(client):
            assert await ask(client, "echo", text="a") == "a"
            site.forget_sessions()
            answers = await asyncio.gather(*(ask(client, "echo", text=str(i)) for i in range(8)))
            assert answers == [str(i) for i in range(8)]
            assert site.opened == 2

        with_client(over_http(site), body)


def test_c14_an_http_server_that_is_restarted_is_found_again():
    async def body(client):
        with HandWrittenSite(port):
            assert await ask(client, "echo", text="a") == "a"
        with HandWrittenSite(port) as second:
            answer = None
            while answer is None:
                with contextlib.suppress(ToolUnavailable):  # the calls that are sent before the death shows
                    answer = await ask(client, "echo", text="b")
            assert answer == "b" and second.opened == 1

    with HandWrittenSite() as first:
        port = first.port
    with_client(over_http(first), body)


@pytest.mark.parametrize("fate", ["no answer", "half an answer"])
def test_c14_a_connection_that_breaks_costs_its_own_call_alone(fate):
    with HandWrittenSite() as site:

        async def body(client):
            slow = asyncio.create_task(ask(client, "echo", text="slow"))
            assert await asyncio.to_thread(site.slow.wait, PATIENCE_S)
            with pytest.raises(ToolUnavailable, match="RemoteProtocolError"):
                await ask(client, "echo", text=fate)
            site.go.set()
            assert await slow == "slow" and site.opened == 1

        with_client(over_http(site), body)


@pytest.mark.parametrize(("status", "says"), [(503, "error response"), (401, "error response")])
def test_an_http_error_of_a_call_is_no_fault_of_the_model(status, says):
    with HandWrittenSite() as site:

        async def body(client):
            assert await ask(client, "echo", text="a") == "a"
            site.refuse_calls_with = status
            with pytest.raises(ToolUnavailable, match=says):
                await ask(client, "echo", text="b")

        with_client(over_http(site), body)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"command": "atlantis-maps"}, "task.mcp.town.command = 'atlantis-maps' is no program"),
        ({"command": "./mcp_by_hands.py"}, "task.mcp.town.command = './mcp_by_hands.py' is no program"),
        ({"cwd": "atlantis"}, "task.mcp.town.cwd leads to .*atlantis, which is no folder"),
        ({"args": ["${NOWHERE}"]}, r"task.mcp.town.args\[0\] uses \${NOWHERE}, but .* has no NOWHERE"),
        ({"env": {"KEY": "x${NOWHERE}"}}, r"task.mcp.town.env.KEY uses \${NOWHERE}"),
    ],
)
def test_what_is_missing_here_is_named_before_anything_starts(config, says):
    with pytest.raises(BadServer, match=says):
        server(**config).check()


def test_a_missing_variable_of_a_header_is_named(monkeypatch):
    config = McpConfig(url="http://${HOST}/mcp", headers={"Authorization": "${TOKEN}"})
    end = Server("town", config, Path())
    with pytest.raises(BadServer, match=r"town.url uses \${HOST}"):
        end.check()
    monkeypatch.setenv("HOST", "h")
    with pytest.raises(BadServer, match=r"town.headers.Authorization uses \${TOKEN}"):
        end.check()
