"""How close do concurrent calls of one MCP session come to the ideal, over stdio and HTTP?

    python benchmarks/toolcall_mcp.py                                # or: python benchmarks/toolcall.py mcp
    python benchmarks/toolcall_mcp.py --concurrency 8,32 --seconds 0.5

A tool sleeps; so many callers call it so many times, each one call after the other, through the executor.
The ideal is the sleep alone. In the same run, the same tool without a server says what the machine and the
executor take of it, and the same calls of the SDK's own session, without Slipstream, what can be had: the SDK
and the server do their work on a few cores while nobody sleeps. CPU is this process's, a call; the server has
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcp import Client
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, whose own name is a package's

from configs.mcp_servers import McpConfig
from toolcall import Executor, Outcome, Tool, ToolCall, ToolContext, tool
from toolcall.mcp.loading import load_mcp_tools
from toolcall.mcp.server import Server
from toolcall.types import ParsedTurn

TARGET = 0.9  # of the ideal
START_TIMEOUT_S = 600.0  # a busy machine is no reason to fail


@tool(timeout=600, max_concurrency=100_000)
async def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "slept"


def serve(port: int) -> None:
    """port: 0 for stdio."""
    from mcp.server import MCPServer

    server = MCPServer("naps", log_level="WARNING")
    server.add_tool(nap.fn, name="nap", description=nap.description)
    if port:
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")


@contextmanager
def http_server() -> Iterator[int]:
    """Its port, once it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait(30)


@dataclass(frozen=True)
class Load:
    callers: int
    calls: int  # of each, one after the other
    seconds: float

    async def measure(self, call: Callable[[float], Awaitable[object]]) -> tuple[float, float]:
        """The share of the ideal, and CPU milliseconds a call."""

        async def one() -> None:
            for _ in range(self.calls):
                await call(self.seconds)

        await asyncio.gather(*(call(0) for _ in range(self.callers)))  # opens the session and its connections
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(self.callers)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return self.calls * self.seconds / wall, 1000 * cpu / (self.callers * self.calls)


async def through_executor(tools: Sequence[Tool], load: Load) -> tuple[float, float]:
    executor = Executor(tools)

    async def call(seconds: float) -> None:
        turn = ParsedTurn((ToolCall("call_0", "nap", {"seconds": seconds}),))
        (result,) = await executor.run(turn, ToolContext())
        assert result.outcome is Outcome.OK, result.text

    try:
        return await load.measure(call)
    finally:
        await executor.close()


async def by_the_sdk(config: McpConfig, load: Load) -> tuple[float, float]:
    async with Client(Server("naps", config, Path()).transport(sys.stderr), cache=None) as session:
        await session.list_tools()
        return await load.measure(lambda seconds: session.call_tool("nap", {"seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", default="8,32,128", help="callers at once")
    parser.add_argument("--calls", type=int, default=5, help="of each caller, one after the other")
    parser.add_argument("--seconds", type=float, default=1.0, help="that the tool sleeps")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    limits = {"connect_timeout_s": START_TIMEOUT_S, "timeout_s": 600, "max_concurrency": 100_000}
    stdio = McpConfig(command=sys.executable, args=[__file__, "--serve", "0"], **limits)
    table = Table(title=f"{options.calls} calls a caller of a tool that sleeps {options.seconds:g} s")
    for column in ("callers", "tool", "of the ideal", f"target {TARGET:.0%}", "CPU ms a call"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    with http_server() as port:
        http = McpConfig(url=f"http://127.0.0.1:{port}/mcp", **limits)
        ways: dict[str, Callable[[Load], Coroutine[None, None, tuple[float, float]]]] = {
            "no server": functools.partial(through_executor, [nap])
        }
        for name, config in (("stdio", stdio), ("http", http)):
            tools = load_mcp_tools({"naps": config}, Path())
            ways[name] = functools.partial(through_executor, tools)
            ways[f"{name}, the SDK alone"] = functools.partial(by_the_sdk, config)
        for callers in map(int, options.concurrency.split(",")):
            for name, way in ways.items():
                share, cpu = asyncio.run(way(Load(callers, options.calls, options.seconds)))
                verdict = ("met" if share >= TARGET else "missed") if name in ("stdio", "http") else ""
                table.add_row(str(callers), name, f"{share:.1%}", verdict, f"{cpu:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
