"""A tool's MCP server dies under an actor and comes back: a real server, connection and executor."""

from __future__ import annotations

import asyncio
from pathlib import Path

from actors.actor import Actor
from actors.tool_pause import PROBE_EVERY_S
from configs.mcp_servers import McpConfig
from tasks import Reward
from tests.fakes import FakeBuffer, FakeClock
from tests.tiny import tiny_tokenizer
from tests.unit.actors.support import correct
from tests.unit.actors.test_actor import leases, make_actor
from tests.unit.toolcall.mcp_site import HandWrittenSite
from toolcall.mcp.loading import load_mcp_tools
from toolcall.parsers import make_parser

PATIENCE_S = 120.0
TAGS = {"find": ("echo", "text")}


def make_calling_actor(url: str, buffer: FakeBuffer, clock: FakeClock) -> Actor:
    """Each trajectory calls `echo` of the server once, then answers."""
    config = McpConfig(url=url, include=["echo"], connect_timeout_s=60, timeout_s=2)
    actor, engine = make_actor(
        buffer,
        tools=load_mcp_tools({"town": config}, Path()),
        parser=make_parser("tag", tags=TAGS, result_tag="result"),
        make_messages=lambda row: [{"role": "user", "content": f"Use <find>. {row['question']}"}],
        rewards=[Reward("correct", correct)],
    )
    encode = tiny_tokenizer().encode
    turns = {"1": encode("<find>cats</find>"), "2": encode("<answer>84</answer><|im_end|>")}
    engine._script = lambda ids, sampling, request: turns[request.rpartition("#")[2]]
    actor._tools._clock = clock
    return actor


def test_c14_no_group_is_leased_while_the_tools_server_is_dead_and_the_run_goes_on_when_it_is_back():
    buffer, clock = FakeBuffer(leases(40)), FakeClock()

    def said(state: str) -> bool:
        return buffer.beats[-1].state.startswith(state)

    async def more_beats(count: int) -> None:
        wanted = len(buffer.beats) + count
        await buffer.until(lambda: len(buffer.beats) >= wanted)

    async def drive(actor):
        running = asyncio.create_task(actor.run())
        async with asyncio.timeout(PATIENCE_S):
            await buffer.until(lambda: len(buffer.put) >= 4)
            site.__exit__()
            await buffer.until(lambda: said("paused: echo is unavailable"))
            await buffer.until(lambda: not buffer.beats[-1].lease_ids)
            left = len(buffer.leases)
            await more_beats(20)
            assert len(buffer.leases) == left > 0
            with HandWrittenSite(port):
                while not said("running"):
                    clock.now += PROBE_EVERY_S
                    await more_beats(1)
                await running

    site = HandWrittenSite()
    site.__enter__()
    port = site.port
    asyncio.run(drive(make_calling_actor(site.url, buffer, clock)))
    assert len(buffer.put) == 80 and buffer.leases == [] and buffer.returned == []
    unscored = [t for t in buffer.put if t.reward is None]
    assert unscored and all("tool echo: echo is unavailable" in str(t.error) for t in unscored)
    assert all(t.reward == 1.0 for t in buffer.put[-8:])
