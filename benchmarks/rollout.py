"""How much of vLLM's own speed does the agent loop keep, with tools that answer at once and with slow ones?

    python benchmarks/rollout.py [--model smollm2-135m-instruct] [--in-flight 64] [--seconds 25]

Episodes of three turns with a tool call after each of the first two. Every turn ends at a drawn length and
calls the tool, whatever the model wrote. Measured by turns, `--rounds` times: the agent loop with tools that
answer at once, and vLLM alone in another process (`benchmarks/rollout_alone.py`) with the same prompts,
lengths and observations. Then, once: tools of log-normal latency (the 99th percentile is five times the
mean) with more episodes in flight; the same in lock step, where each turn waits for the slowest tool of all,
as synchronous loops do; computed from that, one tool after another; and `LLM.generate`, one call a turn. An
ended episode is replaced at once; rates are of turns that ended in `--seconds` after a warm-up.

On a shared machine trust the ratios, and tokens per CPU second more than those of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from actors.agent_loop import Rollouts, run_episode
from actors.engine import Engine, Sampled, Sampling
from actors.renderer import load_tokenizer, make_renderer
from actors.vllm_engine import VllmEngine
from benchmarks.rollout_alone import Run, Script, Window, serve
from buffer.messages import Lease
from configs.schema import RunConfig
from tasks.types import Task
from toolcall import tool
from toolcall.parsers.tag import TagParser
from toolcall.types import ParsedTurn, ToolCall, ToolContext

TURNS = 3
SHORTEST, LONGEST = 12, 36  # sampled tokens of a turn
SIGMA = 0.8455  # of a log-normal whose 99th percentile is five times its mean
NEVER = "</never-written>"
ANSWER_S = 600.0  # for the other process
SPAWN = multiprocessing.get_context("spawn")


# --- episodes of known length -------------------------------------------------------------------------


class DrawnLengths:
    """The engine, with turns that end where they are told. Tells the window of each; remembers what was
    asked, by episode and turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kv_cache_tokens = engine.kv_cache_tokens
        self.window: Window | None = None
        self.asked: defaultdict[str, dict[int, tuple[list[int], int]]] = defaultdict(dict)
        self.prompt_tokens = 0
        self.cached_tokens = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sampled:
        episode, turn = request_id.split("#")
        length = random.Random(request_id).randint(SHORTEST, LONGEST)
        told = replace(sampling, max_tokens=length, stop=(NEVER,), stop_token_ids=())
        sampled = await self._engine.generate(prompt_ids, told, request_id)
        self.asked[episode][int(turn)] = (list(prompt_ids), len(sampled.token_ids))
        self.prompt_tokens += sampled.prompt_tokens
        self.cached_tokens += sampled.cached_tokens
        if self.window is not None:
            self.window.turn_ended(len(sampled.token_ids))
        return replace(sampled, finish_reason="stop")

    async def close(self) -> None: ...

    def scripts(self) -> list[Script]:
        """The whole episodes so far, for another engine to repeat."""
        scripts = []
        for turns in self.asked.values():
            if len(turns) == TURNS:
                (first, _), *later = (turns[turn] for turn in range(1, TURNS + 1))
                ends = [len(prompt) + sampled for prompt, sampled in turns.values()]
                observations = [prompt[end:] for end, (prompt, _) in zip(ends, later, strict=False)]
                scripts.append(Script(first, [sampled for _, sampled in turns.values()], observations))
        return scripts


class AlwaysCalls(TagParser):
    """Reads the turn, and finds a call whatever it holds."""

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        super().parse(text, truncated=truncated, thinking=thinking)
        return ParsedTurn((ToolCall("1", "wait", {"what": "nothing"}),), text)


@dataclass
class Latency:
    """Seconds of a call, the same for the same call in every run; remembers what it drew.

    In lock step the calls of a turn all end with the last of them.
    """

    mean_s: float
    lock_step: asyncio.Barrier | None = None
    drawn: list[float] = field(default_factory=list)

    async def wait(self, key: str) -> None:
        mu = math.log(self.mean_s) - SIGMA**2 / 2
        seconds = random.Random(key).lognormvariate(mu, SIGMA)
        self.drawn.append(seconds)
        await asyncio.sleep(seconds)
        if self.lock_step is not None:
            await self.lock_step.wait()


def make_task(latency: Latency | None) -> Task:
    @tool(timeout=300, max_concurrency=10_000)
    async def wait(what: str, context: ToolContext) -> str:
        """Answer after a while.

        Args:
            what: To wait for.
        """
        if latency is not None:
            await latency.wait(f"{context.trajectory_id}#{len(context.spans)}")
        return f"waited for {what}"

    facts = " ".join(f"Fact {i}: {i * 37 % 101} plus {i * 53 % 89}." for i in range(24))
    return Task(
        name="bench",
        train=[{"n": 0}],
        held_out=[],
        make_messages=lambda row: [{"role": "user", "content": f"{facts} Write <wait>{row['n']}</wait>."}],
        tools=[wait],
        parser=AlwaysCalls({"wait": ("wait", "what")}),
        rewards=[],
        success=lambda episode: True,
        tools_in_prompt=True,
    )


# --- the agent loop -----------------------------------------------------------------------------------


class Loop:
    """Slipstream's own agent loop over one engine."""

    def __init__(self, config: RunConfig, engine: DrawnLengths, tokenizer: Any) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = count()

    async def refilled(self, latency: Latency | None, in_flight: int, seconds: float) -> Run:
        """Always `in_flight` episodes, until the window is over."""
        rollouts, over = self._rollouts(latency), asyncio.Event()
        window = self._engine.window = Window(in_flight, seconds, over.set)
        prompts, cached = 0, 0

        async def one_after_another() -> None:
            while not over.is_set():
                await self._episode(rollouts)
                window.episode_ended()

        async with asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(one_after_another()) for _ in range(in_flight)]
            prompts, cached = self._engine.prompt_tokens, self._engine.cached_tokens
            await over.wait()
            for episode in episodes:
                episode.cancel()
        self._engine.window = None
        hits = self._engine.cached_tokens - cached
        return replace(window.run(), cached=hits / (self._engine.prompt_tokens - prompts))

    async def in_lock_step(self, latency: Latency, in_flight: int) -> tuple[Run, Run]:
        """One batch, all tools of a turn before any next turn; and what it would be with tools one by one."""
        latency.lock_step = asyncio.Barrier(in_flight)
        rollouts = self._rollouts(latency)
        window = self._engine.window = Window(0, math.inf)
        await asyncio.gather(*(self._episode(rollouts) for _ in range(in_flight)))
        self._engine.window = None
        run = window.close()
        turns = [latency.drawn[at : at + in_flight] for at in range(0, len(latency.drawn), in_flight)]
        more_s = sum(sum(waits) - max(waits) for waits in turns)
        return run, replace(run, seconds=run.seconds + more_s)

    def _rollouts(self, latency: Latency | None) -> Rollouts:
        task = make_task(latency)
        return Rollouts.of(self._config, task, self._engine, make_renderer(self._tokenizer, task), "bench")

    async def _episode(self, rollouts: Rollouts) -> None:
        number = next(self._numbers)
        lease = Lease("lease", f"g{number}", 0, 0, 1, (0,), number, 0, math.inf)
        finished = await run_episode(rollouts, lease, 0, {"n": number})
        assert finished.trajectory.error is None, finished.trajectory.error


@contextmanager
def vllm_alone(config: RunConfig, model: Path) -> Iterator[Any]:
    """The pipe to a process that runs `rollout_alone.serve`."""
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(config, model, theirs))
    process.start()
    try:
        yield mine
    finally:
        process.kill()
        process.join()


async def ask(alone: Any, *order: Any) -> Any:
    alone.send(order)
    if not await asyncio.to_thread(alone.poll, ANSWER_S):
        raise TimeoutError(f"vLLM alone did not end {order[0]!r} within {ANSWER_S:g} s")
    return alone.recv()


async def measure(config: RunConfig, model: Path, options: argparse.Namespace) -> dict[str, Run]:
    engine = await VllmEngine.start(config, model, "cpu", 1, seed=0)
    with vllm_alone(config, model) as alone:
        try:
            return await measure_all(config, engine, load_tokenizer(model), alone, options)
        finally:
            await engine.close()


async def measure_all(
    config: RunConfig, engine: Engine, tokenizer: Any, alone: Any, options: argparse.Namespace
) -> dict[str, Run]:
    in_flight, seconds = options.in_flight, options.seconds
    drawn = DrawnLengths(engine)
    loop = Loop(config, drawn, tokenizer)
    instant, reference = Run(), Run()
    for _ in range(options.rounds):
        instant += await loop.refilled(None, in_flight, seconds)
        reference += await ask(alone, "refilled", drawn.scripts(), in_flight, seconds)
    runs = {"vLLM alone": reference, "agent loop, instant tools": instant}
    if options.tool_mean:
        more = round(in_flight * options.over)
        runs[f"agent loop, slow tools, {more} in flight"] = await loop.refilled(
            Latency(options.tool_mean), more, seconds
        )
        lock_step, serial = await loop.in_lock_step(Latency(options.tool_mean), in_flight)
        runs |= {"lock step, slow tools": lock_step, "one tool after another (computed)": serial}
    runs["LLM.generate, a call per turn"] = await ask(alone, "generate", drawn.scripts()[: 2 * in_flight])
    return runs


def print_runs(runs: dict[str, Run], title: str) -> None:
    base = runs["vLLM alone"]
    table = Table(title=title)
    table.add_column("")
    for column in (
        "tokens",
        "tokens/s",
        "of alone",
        "tokens/CPU s",
        "of alone",
        "actor ms/token",
        "prefix hits",
    ):
        table.add_column(column, justify="right")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{run.tokens:,}",
            f"{run.per_s:.0f}",
            f"{run.per_s / base.per_s:.0%}",
            f"{run.per_cpu_s:.0f}",
            f"{run.per_cpu_s / base.per_cpu_s:.0%}",
            f"{1000 * run.actor_cpu_s / run.tokens:.2f}" if run.actor_cpu_s else "",
            f"{run.cached:.0%}" if run.cached else "",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model folder or packaged model")
    parser.add_argument("--in-flight", type=int, default=64, help="episodes, with instant tools")
    parser.add_argument("--over", type=float, default=1.5, help="times as many in flight with slow tools")
    parser.add_argument("--tool-mean", type=float, default=2.0, help="seconds of a slow tool; 0: none")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each measurement, after its warm-up")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    from launcher.preflight import prepare_model

    config = RunConfig.model_validate({"task": {"max_turns": TURNS}, "actors": {"temperature": 0.7}})
    runs = asyncio.run(measure(config, prepare_model(options.model), options))
    print_runs(runs, f"{options.model}, {options.in_flight} episodes in flight, one engine on one thread")


if __name__ == "__main__":
    main()
