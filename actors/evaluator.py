"""Success on held-out prompts: an actor that does not put, so evaluation cannot drift from training.

Two passes: greedy, one sample a prompt, and at the policy's temperature, `eval.samples` a prompt for each of
`eval.seeds`. Every sample is written as it ends, so a stopped evaluation goes on where it was. Run by
`launch.py eval` and, before and after a training run, by the launcher:

    python -m actors.evaluator --config c.toml --model folder --out result.json

`--model http://…` is an OpenAI-compatible endpoint; see `actors.endpoint`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.agent_loop import Finished, Rollouts, run_episode, score_members
from actors.endpoint import Endpoint, EndpointError
from actors.renderer import RendererError, load_tokenizer, make_renderer
from actors.samples import BadSamples, Sample, SampleFile, difference, read_samples, summarise
from buffer.messages import Lease
from configs.load import load_config
from configs.schema import RunConfig
from tasks.loading import load_task
from tasks.types import Message, Row, Task


@dataclass(frozen=True)
class Draw:
    """One prompt, decoding and seed: its members are what group rewards compare."""

    decoding: str
    prompt_index: int
    row: Row
    temperature: float
    seed: int
    members: int

    def lease(self) -> Lease:
        group = f"eval-{self.decoding}-{self.prompt_index}-{self.seed}"
        seed = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=6).digest())
        members = tuple(range(self.members))
        return Lease("eval", group, self.prompt_index, 0, self.members, members, seed, 0, math.inf)


Roll = Callable[[Draw, Lease, int], Awaitable[Finished]]


def draws(config: RunConfig, rows: Sequence[Row]) -> Iterator[Draw]:
    for index, row in enumerate(rows):
        yield Draw("greedy", index, row, 0.0, config.seed, 1)
    for seed in config.eval.seeds:
        for index, row in enumerate(rows):
            yield Draw("sampled", index, row, config.actors.temperature, seed, config.eval.samples)


async def evaluate(
    task: Task, wanted: Sequence[Draw], roll: Roll, file: SampleFile, concurrency: int
) -> list[Sample]:
    """Roll out what `file` lacks, at most `concurrency` episodes at once; the samples of all `wanted`."""
    gate = asyncio.Semaphore(concurrency)
    grouped = any(reward.sees_group for reward in task.rewards)

    async def member(draw: Draw, number: int) -> Finished:
        async with gate:
            finished = await roll(draw, draw.lease(), number)
        if not grouped:
            file.add(_sample(draw, number, finished))
        return finished

    async def one(draw: Draw) -> None:
        missing = [n for n in range(draw.members) if _key(draw, n) not in file.done]
        if grouped and missing:
            missing = list(range(draw.members))
        finished = await asyncio.gather(*(member(draw, number) for number in missing))
        if grouped:
            for number, scored in zip(missing, await score_members(task, finished), strict=True):
                file.add(_sample(draw, number, scored))

    async with asyncio.TaskGroup() as tasks:
        for draw in wanted:
            tasks.create_task(one(draw))
    return [file.done[_key(draw, number)] for draw in wanted for number in range(draw.members)]


def roll_with(rollouts: Rollouts) -> Roll:
    """By an engine in this process, as in training."""

    async def roll(draw: Draw, lease: Lease, number: int) -> Finished:
        seed = None if draw.temperature == 0 else lease.seed + number
        sampling = replace(rollouts.sampling, temperature=draw.temperature, logprobs=False, seed=seed)
        return await run_episode(replace(rollouts, sampling=sampling), lease, number, draw.row)

    return roll


@asynccontextmanager
async def rolling(config: RunConfig, task: Task, options: argparse.Namespace):
    """What rolls episodes out: the model folder in an engine, or the endpoint."""
    if is_endpoint(options.model):
        async with Endpoint(options.model, config, task) as endpoint:
            yield endpoint.roll
        return
    from actors.vllm_engine import VllmEngine

    path = Path(options.model)
    renderer = make_renderer(load_tokenizer(path), task, config.model.renderer)
    engine = await VllmEngine.start(config, path, options.device, options.threads, seed=config.seed)
    rollouts = Rollouts.of(config, task, engine, renderer, "eval")
    try:
        yield roll_with(rollouts)
    finally:
        await rollouts.executor.close()
        await engine.close()


def is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


async def run(config: RunConfig, config_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy and sampled success on the task's held-out prompts, and the comparison asked for."""
    task = load_task(config.task, config_dir, config.seed)
    theirs = read_samples(options.against) if options.against else None
    rows = [task.held_out[i] for i in range(min(config.eval.prompts, len(task.held_out)))]
    wanted = list(draws(config, rows))
    out: Path = options.out
    file = SampleFile(out.with_suffix(".jsonl"), _facts(config, task, options.model))
    try:
        if any(_key(draw, number) not in file.done for draw in wanted for number in range(draw.members)):
            async with rolling(config, task, options) as roll:
                samples = await evaluate(task, wanted, roll, file, config.eval.concurrency)
        else:
            samples = await evaluate(task, wanted, _never, file, 1)
    finally:
        file.close()
    result: dict[str, Any] = {"task": task.name, "model": options.model, "seed": config.seed}
    for decoding, temperature in (("greedy", 0.0), ("sampled", config.actors.temperature)):
        part = summarise(sample for sample in samples if sample.decoding == decoding)
        result[decoding] = part | {"temperature": temperature}
    if theirs is not None:
        result["against"] = {"file": str(options.against), **difference(samples, theirs)}
    return result


async def _never(draw: Draw, lease: Lease, number: int) -> Finished:
    raise AssertionError("every sample is there")


def _facts(config: RunConfig, task: Task, model: str) -> dict[str, Any]:
    """What must be the same for samples to belong to one evaluation."""
    limits = config.task.model_dump(include={"max_turns", "max_tokens_per_turn", "max_trajectory_tokens"})
    files = sorted(Path(model).glob("*.safetensors")) if not is_endpoint(model) else []
    weights = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    sampling = {"temperature": config.actors.temperature, "options": config.task.options}
    return {"task": task.name, "model": model, "weights": weights, **sampling, **limits}


def _key(draw: Draw, number: int) -> tuple[str, int, int, int]:
    return (draw.decoding, draw.prompt_index, draw.seed, number)


def _sample(draw: Draw, number: int, finished: Finished) -> Sample:
    trajectory, episode = finished.trajectory, finished.episode
    return Sample(
        decoding=draw.decoding,
        prompt_index=draw.prompt_index,
        prompt=prompt_hash(episode.messages),
        seed=draw.seed,
        number=number,
        success=finished.success,
        reward=trajectory.reward,
        stop_reason=str(trajectory.stop_reason),
        components=trajectory.reward_components,
        error=trajectory.error,
        num_tokens=episode.num_tokens,
        row=draw.row,
        turns=list(episode.turns),
        results=[[result.text for result in turn] for turn in episode.results],
    )


def prompt_hash(messages: Sequence[Message]) -> str:
    return hashlib.blake2b(
        json.dumps(messages, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console

    from actors.evaluation_tables import tables

    console = Console()
    for table in tables(result):
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m actors.evaluator", description="Any config key is an option, e.g. --eval.prompts 512."
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", required=True, help="a prepared model folder, or http://…/v1")
    parser.add_argument("--out", type=Path, required=True, help="JSON; every sample goes beside it as JSONL")
    parser.add_argument("--against", type=Path, help="another evaluation's .jsonl")
    parser.add_argument("--label", default="", help="kept in the result, e.g. before or after")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options, overrides = parser.parse_known_args(arguments)
    loaded = load_config(options.config, overrides)
    started = time.monotonic()
    try:
        result = asyncio.run(run(loaded.config, loaded.config_dir, options))
    except (BadSamples, EndpointError, RendererError) as error:
        sys.exit(f"error: {error}")
    result |= {"label": options.label, "seconds": round(time.monotonic() - started, 1)}
    options.out.write_text(json.dumps(result, indent=1, default=str))
    print_table(result)


if __name__ == "__main__":
    main()
