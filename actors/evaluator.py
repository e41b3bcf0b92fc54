"""Success on held-out prompts: an actor that does not put, so evaluation cannot drift from training.

Two passes, greedy and at the policy's temperature, one sample a prompt, with a 95 % Wilson interval.
Run by `launch.py eval` and, before and after a training run, by the launcher:

    python -m actors.evaluator --config c.toml --model folder --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from actors.agent_loop import Finished, Rollouts, run_episode
from actors.renderer import load_tokenizer, make_renderer
from actors.vllm_engine import VllmEngine
from buffer.messages import Lease
from configs.load import load_config
from configs.schema import RunConfig
from tasks.loading import load_task
from tasks.types import Row

Z_95 = 1.959964


@dataclass(frozen=True)
class Measure:
    """Share of prompts solved, with its 95 % interval, and why episodes ended."""

    success: float
    low: float
    high: float
    n: int
    reward_mean: float
    stop_reasons: dict[str, int]
    components: dict[str, float]


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion at 95 % (Wilson 1927, JASA 22:209)."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def measure(finished: Sequence[Finished]) -> Measure:
    n = len(finished)
    solved = sum(item.success for item in finished)
    low, high = wilson_interval(solved, n)
    rewards = [item.trajectory.reward for item in finished if item.trajectory.reward is not None]
    parts = [item.trajectory.reward_components for item in finished if item.trajectory.reward is not None]
    keys = parts[0] if parts else {}
    return Measure(
        success=solved / n if n else 0.0,
        low=low,
        high=high,
        n=n,
        reward_mean=sum(rewards) / len(rewards) if rewards else math.nan,
        stop_reasons=dict(Counter(item.trajectory.stop_reason for item in finished)),
        components={key: sum(part[key] for part in parts) / len(parts) for key in keys},
    )


async def evaluate(
    rollouts: Rollouts, rows: Sequence[Row], temperature: float, concurrency: int
) -> list[Finished]:
    """One episode per row, at most `concurrency` at once, in row order."""
    rollouts = replace(rollouts, sampling=replace(rollouts.sampling, temperature=temperature, logprobs=False))
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, row: Row) -> Finished:
        async with gate:
            lease = Lease("eval", f"eval-{temperature:g}-{number}", number, 0, 1, (0,), number, 0, math.inf)
            return await run_episode(rollouts, lease, 0, row)

    return await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))


async def run(config: RunConfig, config_dir: Path, model_path: Path, device: str, threads: int) -> dict:
    """Greedy and sampled success of the model folder on the task's held-out prompts."""
    task = load_task(config.task, config_dir, config.seed)
    rows = [task.held_out[i] for i in range(min(config.eval.prompts, len(task.held_out)))]
    renderer = make_renderer(load_tokenizer(model_path), task, config.model.renderer)
    engine = await VllmEngine.start(config, model_path, device, threads, seed=config.seed)
    rollouts = Rollouts.of(config, task, engine, renderer, "eval")
    try:
        result: dict = {"task": task.name, "model": str(model_path), "seed": config.seed}
        for label, temperature in (("greedy", 0.0), ("sampled", config.actors.temperature)):
            finished = await evaluate(rollouts, rows, temperature, config.eval.concurrency)
            result[label] = asdict(measure(finished)) | {"temperature": temperature}
            result[f"{label}_samples"] = [_sample(item) for item in finished]
        return result
    finally:
        await rollouts.executor.close()
        await engine.close()


def _sample(finished: Finished) -> dict:
    trajectory = finished.trajectory
    return {
        "prompt_index": trajectory.prompt_index,
        "success": finished.success,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "stop_reason": trajectory.stop_reason,
        "row": finished.episode.row,
        "turns": finished.episode.turns,
        "results": [[result.text for result in turn] for turn in finished.episode.results],
    }


def print_table(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['task']}: {result['model']}")
    for column in ("decoding", "success", "95 % interval", "prompts", "mean reward", "ended by"):
        table.add_column(column)
    for label in ("greedy", "sampled"):
        part = result[label]
        table.add_row(
            label if label == "greedy" else f"sampled, T = {part['temperature']:g}",
            f"{part['success']:.1%}",
            f"{part['low']:.1%} - {part['high']:.1%}",
            str(part["n"]),
            f"{part['reward_mean']:.3f}",
            ", ".join(f"{reason} {count}" for reason, count in sorted(part["stop_reasons"].items())),
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m actors.evaluator", description="Any config key is an option, e.g. --eval.prompts 512."
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a prepared model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON with the measures and every sample")
    parser.add_argument("--label", default="", help="kept in the result, e.g. before or after")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options, overrides = parser.parse_known_args(arguments)
    loaded = load_config(options.config, overrides)
    started = time.monotonic()
    result = asyncio.run(
        run(loaded.config, loaded.config_dir, options.model, options.device, options.threads)
    )
    result |= {"label": options.label, "seconds": round(time.monotonic() - started, 1)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1, default=str))
    print_table(result)


if __name__ == "__main__":
    main()
