"""How close do concurrent calls of one MCP session come to the ideal, over stdio and HTTP?

    python benchmarks/toolcall_mcp.py                                # or: python benchmarks/toolcall.py mcp
    python benchmarks/toolcall_mcp.py --concurrency 8,32 --seconds 0.5

A tool sleeps; so many callers call it so many times, each one call after the other, through the executor.
The ideal is the sleep alone. The same tool without a server, in the same run, says what the machine and the
executor take of it. CPU is this process's, a call; the server has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, whose own name is a package's

from configs.mcp_servers import McpConfig
from toolcall import Executor, Outcome, Tool, ToolCall, ToolContext, tool
from toolcall.mcp.loading import load_mcp_tools
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


async def measure(tools: Sequence[Tool], callers: int, calls: int, seconds: float) -> tuple[float, float]:
    """The share of the ideal, and CPU milliseconds a call."""
    executor = Executor(tools)

    async def one(number: int, times: int, sleep: float) -> None:
        context = ToolContext(trajectory_id=str(number))
        for _ in range(times):
            turn = ParsedTurn((ToolCall("call_0", "nap", {"seconds": sleep}),))
            (result,) = await executor.run(turn, context)
            assert result.outcome is Outcome.OK, result.text

    await one(-1, 1, 0)  # opens the session
    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(one(number, calls, seconds))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await executor.close()
    return calls * seconds / wall, 1000 * cpu / (callers * calls)


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
        loaded = {
            name: load_mcp_tools({"naps": end}, Path()) for name, end in (("stdio", stdio), ("http", http))
        }
        for callers in map(int, options.concurrency.split(",")):
            for name, tools in {"no server": [nap], **loaded}.items():
                share, cpu = asyncio.run(measure(tools, callers, options.calls, options.seconds))
                verdict = "" if name == "no server" else "met" if share >= TARGET else "missed"
                table.add_row(str(callers), name, f"{share:.1%}", verdict, f"{cpu:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
