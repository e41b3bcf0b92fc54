"""Success on held-out prompts: an actor that does not put, so evaluation cannot drift from training.

Two passes: greedy, one sample a prompt, and at the policy's temperature, `eval.samples` a prompt for each of
`eval.seeds`. Every sample is written as it ends, so a stopped evaluation goes on where it was, and what an
outage left unscored is tried again. Run by `launch.py eval` and, before and after a training run, by the
launcher:

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.agent_loop import Finished, Rollouts, mixed_rollouts, run_episode, score_members
from actors.endpoint import Endpoint, EndpointError
from actors.renderer import RendererError, load_tokenizer, make_renderers
from actors.samples import BadSamples, Sample, SampleFile, difference, read_samples, summarise
from buffer.messages import Lease
from configs.load import load_config
from configs.places import is_endpoint
from configs.schema import RunConfig
from tasks.mixture import Mixture, load_mixture
from tasks.types import Message, Row, Task
from tasks.usage import usage
from toolcall import work


@dataclass(frozen=True)
class Draw:
    """One prompt, decoding and seed: its members are what group rewards compare."""

    decoding: str
    prompt_index: int
    row: Row
    temperature: float
    seed: int
    members: int
    part: int = 0  # number of the task in the mixture
    task: str = ""

    def lease(self) -> Lease:
        group = f"eval-{self.task}-{self.decoding}-{self.prompt_index}-{self.seed}"
        seed = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=6).digest())
        members = tuple(range(self.members))
        return Lease("eval", group, self.prompt_index, 0, self.members, members, seed, 0, math.inf)


Roll = Callable[[Draw, Lease, int], Awaitable[Finished]]


def draws(config: RunConfig, rows: Sequence[Row], part: int = 0, task: str = "") -> Iterator[Draw]:
    for index, row in enumerate(rows):
        yield Draw("greedy", index, row, 0.0, config.seed, 1, part, task)
    for seed in config.eval.seeds:
        for index, row in enumerate(rows):
            temperature, members = config.actors.temperature, config.eval.samples
            yield Draw("sampled", index, row, temperature, seed, members, part, task)


def all_draws(config: RunConfig, mixture: Mixture) -> list[Draw]:
    """Of every task `eval.prompts` held-out prompts."""
    wanted = []
    for number, part in enumerate(mixture.parts):
        held_out = part.task.held_out
        rows = [held_out[i] for i in range(min(config.eval.prompts, len(held_out)))]
        wanted += draws(config, rows, number, part.task.name)
    return wanted


async def evaluate(
    tasks: Sequence[Task], wanted: Sequence[Draw], roll: Roll, file: SampleFile, concurrency: int
) -> list[Sample]:
    """Roll out what `file` lacks or has without a score, at most `concurrency` episodes at once; the samples
    of all `wanted`."""
    gate = asyncio.Semaphore(concurrency)
    grouped = [any(reward.sees_group for reward in task.rewards) for task in tasks]

    async def member(draw: Draw, number: int) -> Finished:
        async with gate:
            finished = await roll(draw, draw.lease(), number)
        if not grouped[draw.part]:
            file.add(_sample(draw, number, finished))
        return finished

    async def one(draw: Draw) -> None:
        missing = [n for n in range(draw.members) if not file.has(_key(draw, n))]
        if grouped[draw.part] and missing:
            missing = list(range(draw.members))
        finished = await asyncio.gather(*(member(draw, number) for number in missing))
        if grouped[draw.part]:
            members = await score_members(tasks[draw.part], finished)
            for number, scored in zip(missing, members, strict=True):
                file.add(_sample(draw, number, scored))

    try:
        async with asyncio.TaskGroup() as running:
            for draw in wanted:
                running.create_task(one(draw))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first cause, for the log's last line
    return [file.done[_key(draw, number)] for draw in wanted for number in range(draw.members)]


def roll_with(rollouts: Sequence[Rollouts]) -> Roll:
    """By an engine in this process, as in training; `rollouts` of each task."""

    async def roll(draw: Draw, lease: Lease, number: int) -> Finished:
        own = rollouts[draw.part]
        seed = None if draw.temperature == 0 else lease.seed + number
        sampling = replace(own.sampling, temperature=draw.temperature, logprobs=False, seed=seed)
        return await run_episode(replace(own, sampling=sampling), lease, number, draw.row)

    return roll


@asynccontextmanager
async def rolling(config: RunConfig, mixture: Mixture, options: argparse.Namespace) -> AsyncIterator[Roll]:
    """What rolls episodes out: the model folder in an engine, or the endpoint."""
    async with AsyncExitStack() as stack:
        if is_endpoint(options.model):
            endpoints = [
                await stack.enter_async_context(Endpoint(options.model, part.limits, part.task))
                for part in mixture.parts
            ]
            yield lambda draw, lease, number: endpoints[draw.part].roll(draw, lease, number)
            return
        from actors.vllm_engine import VllmEngine

        path = Path(options.model)
        renderers = make_renderers(load_tokenizer(path), mixture, config.model.renderer)
        engine = await VllmEngine.start(config, path, options.device, options.threads, seed=config.seed)
        stack.push_async_callback(engine.close)
        rollouts = mixed_rollouts(config, mixture, engine, renderers, "eval")
        for each in rollouts:
            stack.push_async_callback(each.executor.close)
        yield roll_with(rollouts)


async def run(config: RunConfig, config_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy and sampled success on the task's held-out prompts, and the comparison asked for."""
    mixture = load_mixture(config.task, config_dir, config.seed)
    tasks = [part.task for part in mixture.parts]
    if not mixture.held_out(1):
        raise BadSamples("the task has no held-out rows to evaluate; raise task.held_out")
    theirs = read_samples(options.against) if options.against else None
    wanted = all_draws(config, mixture)
    out: Path = options.out
    file = SampleFile(out.with_suffix(".jsonl"), _facts(config, mixture, options.model))
    try:
        refuse_other_prompts(tasks, wanted, file)
        if not all(file.has(_key(draw, number)) for draw in wanted for number in range(draw.members)):
            async with rolling(config, mixture, options) as roll:
                samples = await evaluate(tasks, wanted, roll, file, config.eval.concurrency)
        else:
            samples = await evaluate(tasks, wanted, _never, file, 1)
    finally:
        file.close()
    names = [task.name for task in tasks]
    result: dict[str, Any] = {"task": " + ".join(names), "model": options.model, "seed": config.seed}
    result |= _by_decoding(config, samples)
    if len(tasks) > 1:
        result["tasks"] = {
            name: _by_decoding(config, [sample for sample in samples if sample.task == name])
            for name in names
        }
    if used := usage.take():
        result["judge"] = used
    if theirs is not None:
        result["against"] = {"file": str(options.against), **difference(samples, theirs)}
    return result


def _by_decoding(config: RunConfig, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        decoding: summarise(sample for sample in samples if sample.decoding == decoding)
        | {"temperature": temperature}
        for decoding, temperature in (("greedy", 0.0), ("sampled", config.actors.temperature))
    }


def refuse_other_prompts(tasks: Sequence[Task], wanted: Sequence[Draw], file: SampleFile) -> None:
    """Raises BadSamples if the data has changed since the file was begun."""
    for draw in wanted:
        done = file.done.get(_key(draw, 0))
        if done is not None and done.prompt != prompt_hash(tasks[draw.part].make_messages(draw.row)):
            raise BadSamples(
                f"held-out prompt {draw.prompt_index} of {draw.task} was another when these samples were "
                "drawn: the data or the prompt has changed; give another --out or remove the file"
            )


async def _never(draw: Draw, lease: Lease, number: int) -> Finished:
    raise AssertionError("every sample is there")


def _facts(config: RunConfig, mixture: Mixture, model: str) -> dict[str, Any]:
    """What must be the same for samples to belong to one evaluation."""
    files = sorted(Path(model).glob("*.safetensors")) if not is_endpoint(model) else []
    weights = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    facts = {"model": model, "weights": weights, "temperature": config.actors.temperature}
    for part in mixture.parts:
        # Without what is at its default, so that a setting that a later version adds makes no difference.
        settings = part.limits.model_dump(
            mode="json", exclude_defaults=True, exclude={"trajectory_timeout_s", "mix"}
        )
        facts |= {f"{part.task.name}: task.{name}": value for name, value in settings.items()}
    return facts


def _key(draw: Draw, number: int) -> tuple[str, str, int, int, int]:
    return (draw.task, draw.decoding, draw.prompt_index, draw.seed, number)


def _sample(draw: Draw, number: int, finished: Finished) -> Sample:
    trajectory, episode = finished.trajectory, finished.episode
    return Sample(
        task=draw.task,
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
        result = work.run(run(loaded.config, loaded.config_dir, options))
    except (BadSamples, EndpointError, RendererError) as error:
        sys.exit(f"error: {error}")
    result |= {"label": options.label, "seconds": round(time.monotonic() - started, 1)}
    whole = options.out.with_suffix(".part")  # a launcher that goes on with its run reads all or nothing
    whole.write_text(json.dumps(result, indent=1, default=str))
    whole.replace(options.out)
    print_table(result)


if __name__ == "__main__":
    main()
