"""What does a sandboxed call of `python` cost? Cold, warm and in a session, beside starting an interpreter.

    python benchmarks/toolcall_sandbox.py [--calls 200]

Cold: the first call, which starts the fork server. Warm: a new box for each call; now and then, so that one
made ahead is ready; one call after another and 16 at once, which wait for boxes to be made: their calls per
second are what the machine makes. Session: calls in one box. The floor is what isolation by a fresh
interpreter, without any sandbox, would cost (`python -c`). All in one run: read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from toolcall.sandbox import Limits, Sandbox

CODE = "print(sum(range(100)))"
LIMITS = Limits(wall_s=60, memory_mb=128)
AT_ONCE = 16
PAUSE_S = 0.2  # for boxes to be made ahead


@dataclass(frozen=True)
class Timed:
    calls: list[float]  # seconds of each
    wall_s: float


async def timed(
    call: Callable[[], Awaitable[object]], calls: int, at_once: int = 1, pause_s: float = 0.0
) -> Timed:
    """`at_once` in flight, each after a pause that does not count."""
    slots = asyncio.Semaphore(at_once)

    async def one() -> float:
        async with slots:
            await asyncio.sleep(pause_s)
            started = time.perf_counter()
            await call()
            return time.perf_counter() - started

    started = time.perf_counter()
    seconds = await asyncio.gather(*(one() for _ in range(calls)))
    return Timed(seconds, time.perf_counter() - started - pause_s * calls / at_once)


async def measure(calls: int) -> dict[str, Timed]:
    async def fresh() -> None:
        done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CODE], capture_output=True)
        assert done.stdout == b"4950\n"

    async def cold() -> None:
        async with Sandbox(LIMITS) as sandbox:
            assert (await sandbox.run(CODE)).stdout == "4950\n"

    seconds = {"cold: fork server, box, call": await timed(cold, max(3, calls // 20))}
    async with Sandbox(LIMITS) as sandbox:
        await sandbox.run(CODE)
        run = functools.partial(sandbox.run, CODE)
        seconds[f"warm: a call every {PAUSE_S:g} s"] = await timed(run, calls // 4, pause_s=PAUSE_S)
        seconds["warm: one after another"] = await timed(run, calls)
        seconds[f"warm: {AT_ONCE} at once"] = await timed(run, calls, AT_ONCE)
        async with sandbox.session() as session:
            await session.run(CODE)
            seconds["session"] = await timed(lambda: session.run(CODE), calls)
    seconds["floor: python -c, no sandbox"] = await timed(fresh, max(3, calls // 10))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=200)
    table = Table("a call of print(sum(range(100)))", "calls", "p50 ms", "p99 ms", "min ms", "calls/s")
    for name, measured in asyncio.run(measure(parser.parse_args().calls)).items():
        ordered = sorted(1000 * value for value in measured.calls)
        p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        rate = len(ordered) / measured.wall_s
        table.add_row(name, str(len(ordered)), f"{p50:.2f}", f"{p99:.2f}", f"{ordered[0]:.2f}", f"{rate:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
