"""Do two actors generate twice as much as one?

    python benchmarks/rollout_scaling.py [--actors 1,2] [--in-flight 32] [--seconds 25]

Each actor is a process of its own with its own engine on one thread, and runs the agent loop of
`benchmarks/rollout.py` with tools that answer at once. All engines of a row are ready before the first
starts, and all measure the same seconds. With as many actors as cores, the agent loops share the engines'.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from pathlib import Path
from threading import Barrier
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from actors.renderer import load_tokenizer
from actors.vllm_engine import VllmEngine
from benchmarks.rollout import TURNS, DrawnLengths, Loop
from benchmarks.rollout_alone import Run
from configs.schema import RunConfig

READY_S, END_S = 300.0, 600.0
SPAWN = multiprocessing.get_context("spawn")


def act(model: Path, in_flight: int, seconds: float, all_ready: Barrier, results: Any) -> None:
    results.put(asyncio.run(_act(model, in_flight, seconds, all_ready)))


async def _act(model: Path, in_flight: int, seconds: float, all_ready: Barrier) -> Run:
    config = RunConfig.model_validate({"task": {"max_turns": TURNS}, "actors": {"temperature": 0.7}})
    engine = await VllmEngine.start(config, model, "cpu", 1, seed=0)
    try:
        loop = Loop(config, DrawnLengths(engine), load_tokenizer(model))
        await asyncio.to_thread(all_ready.wait, READY_S)
        return await loop.refilled(None, in_flight, seconds)
    finally:
        await engine.close()


def measure(actors: int, model: Path, in_flight: int, seconds: float) -> list[Run]:
    all_ready, results = SPAWN.Barrier(actors), SPAWN.Queue()
    arguments = (model, in_flight, seconds, all_ready, results)
    processes = [SPAWN.Process(target=act, args=arguments) for _ in range(actors)]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=END_S) for _ in processes]
    finally:
        for process in processes:
            process.join(READY_S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model folder or packaged model")
    parser.add_argument("--actors", default="1,2", help="numbers of actors, by commas")
    parser.add_argument("--in-flight", type=int, default=32, help="episodes of each actor")
    parser.add_argument("--seconds", type=float, default=25.0)
    options = parser.parse_args()
    from launcher.preflight import prepare_model

    model = prepare_model(options.model)
    table = Table("actors", "tokens/s", "of the first row", "tokens/CPU s", title=options.model)
    base = None
    for actors in map(int, options.actors.split(",")):
        runs = measure(actors, model, options.in_flight, options.seconds)
        per_s = sum(run.per_s for run in runs)
        base = base or per_s
        per_cpu_s = sum(run.tokens for run in runs) / sum(run.engine_cpu_s + run.actor_cpu_s for run in runs)
        table.add_row(str(actors), f"{per_s:.0f}", f"{per_s / base:.2f}", f"{per_cpu_s:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
