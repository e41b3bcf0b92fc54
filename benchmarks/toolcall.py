"""What do tool calls cost beside the tools themselves?

    python benchmarks/toolcall.py                  # every part with its defaults, a few minutes
    python benchmarks/toolcall.py overhead         # a call through parse, validate, execute and render
    python benchmarks/toolcall.py latency          # slow tools: against a barrier after each turn, and serial
    python benchmarks/toolcall.py cache            # a hit in memory, and on disk

A file `toolcall_<part>.py` beside this one is a part too, with options of its own: MCP servers, the sandbox,
the search index. All ratios are of one run.
CPU time is this process's: on a busy machine believe it rather than the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, whose own name is a package's

from toolcall import Executor, Tool, ToolContext, tool
from toolcall.parsers import make_parser
from toolcall.types import ParsedTurn, ToolCall

HERE = Path(__file__).parent
OVERHEAD_TARGET_US = 300.0
LATENCY_TARGET = 1.05
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": "2"}}\n</tool_call>'


@dataclass(frozen=True)
class Cost:
    """Seconds of one measured piece of work."""

    wall: float
    cpu: float


async def measured(work: Callable[[], Awaitable[object]]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


# --- overhead ---------------------------------------------------------------------------------------


@tool(idempotent=True, max_concurrency=100_000)
async def add(a: int, b: int = 0) -> str:
    """Add two numbers."""
    await asyncio.sleep(0)
    return str(a + b)


async def overhead(trajectories: int, turns: int, rounds: int) -> Table:
    """Every trajectory is a coroutine and makes one call a turn, through everything or as a bare await."""
    executor, parser = Executor([add]), make_parser("hermes", schemas=[add.schema()])
    calls = trajectories * turns

    async def bare(number: int) -> None:
        for turn in range(turns):
            await add.fn(a=number + turn, b=2)

    async def whole(number: int) -> None:
        context = ToolContext(trajectory_id=str(number))
        for turn in range(turns):
            (result,) = await executor.run(parser.parse(CALL % (number + turn)), context)
            assert str(number + turn + 2) in parser.render_result(result)

    async def parse(number: int) -> None:
        for turn in range(turns):
            parser.parse(CALL % (number + turn))

    def all_of(one: Callable[[int], Awaitable[None]]) -> Callable[[], Awaitable[object]]:
        return lambda: asyncio.gather(*(one(number) for number in range(trajectories)))

    table = Table(title=f"overhead of a call, {trajectories} trajectories at once, {turns} calls each")
    for column in ("round", "bare await", "parsing alone", "whole call", "overhead (CPU)", "overhead (wall)"):
        table.add_column(column, justify="right")
    found = []
    for number in range(rounds):
        alone = await measured(all_of(bare))
        parsing = await measured(all_of(parse))
        full = await measured(all_of(whole))
        cpu, wall = ((full.cpu - alone.cpu) / calls * 1e6, (full.wall - alone.wall) / calls * 1e6)
        found.append(cpu)
        cells = (alone.cpu / calls, parsing.cpu / calls, full.cpu / calls)
        table.add_row(
            str(number), *(f"{cell * 1e6:.1f} µs" for cell in cells), f"{cpu:.1f} µs", f"{wall:.1f} µs"
        )
    median = statistics.median(found)
    met = _met(median < OVERHEAD_TARGET_US)
    table.caption = f"median {median:.0f} µs of CPU; target: below {OVERHEAD_TARGET_US:.0f} µs: {met}"
    return table


# --- latency ----------------------------------------------------------------------------------------


@tool(timeout=600, max_concurrency=100_000)
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


async def latency(trajectories: int, turns: int, mean: float, sigma: float, seed: int) -> Table:
    """Latencies are log-normal. Each way of running the calls has the same ones."""
    rng = random.Random(seed)
    mu = math.log(mean) - sigma**2 / 2
    chains = [[rng.lognormvariate(mu, sigma) for _ in range(turns)] for _ in range(trajectories)]
    bound = max(map(sum, chains))

    executor = Executor([wait])

    async def call(seconds: float, context: ToolContext) -> None:
        await executor.run(ParsedTurn((ToolCall("call_0", "wait", {"seconds": seconds}),)), context)

    async def chain(latencies: Sequence[float]) -> None:
        context = ToolContext()
        for seconds in latencies:
            await call(seconds, context)

    async def each_on_its_own() -> None:
        await asyncio.gather(*map(chain, chains))

    async def barrier_after_each_turn() -> None:
        contexts = [ToolContext() for _ in chains]
        for turn in range(turns):
            await asyncio.gather(*(call(c[turn], own) for c, own in zip(chains, contexts, strict=True)))

    own = await measured(each_on_its_own)
    barrier = await measured(barrier_after_each_turn)
    table = Table(
        title=f"{trajectories} trajectories of {turns} calls, log-normal, mean {mean} s, sigma {sigma}"
    )
    for column in ("how", "wall", "of the bound"):
        table.add_column(column, justify="right")
    for how, seconds in (
        ("the slowest chain (lower bound)", bound),
        ("each trajectory on its own", own.wall),
        ("a barrier after each turn", barrier.wall),
        ("serial (sum of the latencies)", sum(map(sum, chains))),
    ):
        table.add_row(how, f"{seconds:.2f} s", f"{seconds / bound:.3f}")
    ratio = own.wall / bound
    table.caption = f"target: at most {LATENCY_TARGET} of the bound: {_met(ratio <= LATENCY_TARGET)}"
    return table


# --- cache ------------------------------------------------------------------------------------------


async def cache(hits: int) -> Table:
    """One call after another; `disk` reads the store each time, as the first call of another actor does."""
    table = Table(title=f"cost of a call, {hits} calls one after another")
    for column in ("what", "p50", "p99", "CPU a call"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        memory, disk = (add.with_options({"cache": kind}) for kind in ("memory", "disk"))
        for what, cached, entries in (
            ("no cache: the tool runs", add, 0),
            ("hit in memory", memory, 4096),
            ("hit on disk", disk, 0),
        ):
            executor = Executor([cached], shared=Path(folder), cache_entries=entries)
            await _call(executor, cached)
            samples: list[float] = []
            cost = await measured(lambda e=executor, t=cached, s=samples: _calls(e, t, hits, s))
            samples.sort()
            p50, p99 = samples[len(samples) // 2], samples[int(len(samples) * 0.99)]
            table.add_row(
                what, f"{p50 * 1e6:.0f} µs", f"{p99 * 1e6:.0f} µs", f"{cost.cpu / hits * 1e6:.0f} µs"
            )
            await executor.close()
    return table


async def _calls(executor: Executor, cached: Tool, number: int, samples: list[float]) -> None:
    for _ in range(number):
        began = time.perf_counter()
        await _call(executor, cached)
        samples.append(time.perf_counter() - began)


async def _call(executor: Executor, cached: Tool) -> None:
    turn = ParsedTurn((ToolCall("call_0", cached.name, {"a": 1, "b": 2}),))
    (result,) = await executor.run(turn, ToolContext())
    assert result.text == "3"


# --- the command ------------------------------------------------------------------------------------


def _met(condition: bool) -> str:
    return "met" if condition else "not met"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", metavar="part")
    for name, part in PARTS.items():
        options = parts.add_parser(name, help=(part.__doc__ or "").splitlines()[0])
        for option, default in DEFAULTS[name].items():
            options.add_argument(f"--{option}", type=type(default), default=default)
    for path in OTHERS.values():
        parts.add_parser(path.stem.removeprefix("toolcall_"), help=f"see {path.name} --help", add_help=False)
    return parser


PARTS: dict[str, Callable[..., Awaitable[Table]]] = {"overhead": overhead, "latency": latency, "cache": cache}
DEFAULTS: dict[str, dict[str, int | float]] = {
    "overhead": {"trajectories": 1000, "turns": 5, "rounds": 5},
    "latency": {"trajectories": 256, "turns": 3, "mean": 0.5, "sigma": 1.0, "seed": 0},
    "cache": {"hits": 2000},
}
OTHERS = {path.stem.removeprefix("toolcall_"): path for path in sorted(HERE.glob("toolcall_*.py"))}


def main(arguments: Sequence[str] | None = None) -> None:
    options, rest = _parser().parse_known_args(arguments)
    part = options.part
    if part in OTHERS:
        run_other(OTHERS[part], rest)
        return
    if rest:
        sys.exit(f"unknown option {rest[0]}; see --help")
    for name in [part] if part else PARTS:
        given = {
            option: getattr(options, option) if part else default
            for option, default in DEFAULTS[name].items()
        }
        Console().print(asyncio.run(PARTS[name](**given)))
    if not part:
        for path in OTHERS.values():
            run_other(path, [])


def run_other(path: Path, arguments: list[str]) -> None:
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
