"""Real engines killed at random moments around weight updates: does any other wait, or serve wrong weights?

    python benchmarks/weightsync_kills.py [--kills 20] [--backend auto]

A publisher and two actors, each with a vLLM engine of a small random model that generates all the time. For
each kill a version is published; at a random moment of the update one engine process, or its whole actor,
gets SIGKILL. Then the other actor must reach the version, its logprobs of a fixed sequence must be those of
transformers under exactly that version, and of the killed one no process may be left. A new actor takes its
place and joins whatever goes on. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs.run_folder import CurveKeys
from configs.schema import RunConfig
from tests.unit.weightsync.support import spec_of
from weightsync.publisher import Publisher

START_S, WAIT_S = 400.0, 200.0  # only a failure waits so long
POLL_S = 0.02
IDS = list(range(10, 40))
TOLERANCE = 1e-3  # fp32 on both sides; versions are a hundred times as far apart
SPAWN = multiprocessing.get_context("spawn")


# --- an actor, in a process of its own ----------------------------------------------------------------


def act(model: Path, name: str, endpoint: str, keys: CurveKeys, orders: Any) -> None:
    with contextlib.suppress(EOFError):
        asyncio.run(_act(model, name, endpoint, keys, orders))


async def _act(model: Path, name: str, endpoint: str, keys: CurveKeys, orders: Any) -> None:
    """Answers each version from the pipe, once it has it, with the engine's logprobs."""
    from actors.vllm_engine import VllmEngine
    from weightsync.receiver import Receiver
    from weightsync.vllm_engine import VllmWeights

    config = RunConfig.model_validate({"model": {"dtype": "float32"}})
    engine = await VllmEngine.start(config, model, "cpu", 1, seed=0)
    weights = VllmWeights(engine.llm)
    receiver = Receiver(weights, keys, name, WAIT_S, "keep", endpoint=endpoint)

    async def obey() -> None:
        orders.send("ready")
        while True:
            while not orders.poll():  # noqa: ASYNC110 - a thread that waits would keep a broken actor alive
                await asyncio.sleep(POLL_S)
            version = orders.recv()
            await receiver.wait_for_version(version, WAIT_S)
            orders.send((receiver.version, await weights.logprobs(IDS)))

    async with asyncio.TaskGroup() as tasks:  # an engine that died ends it, as it ends a real actor
        tasks.create_task(receiver.run())
        tasks.create_task(obey())
        for number in range(4):
            tasks.create_task(generate(engine, number))


async def generate(engine: Any, number: int) -> None:
    from actors.engine import Sampling

    sampling = Sampling(temperature=1.0, max_tokens=200)

    for turn in range(10**6):
        await engine.generate([number + 10] * 64, sampling, f"{number}#{turn}")


class Actor:
    """The process, seen from outside."""

    def __init__(self, *args: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=act, args=(*args, theirs))
        self.process.start()
        theirs.close()

    def hear(self, timeout_s: float) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return self.pipe.recv()

    def processes(self) -> list[psutil.Process]:
        actor = psutil.Process(self.process.pid)
        return [actor, *actor.children(recursive=True)]

    def close(self) -> None:
        for process in self.processes() if self.process.is_alive() else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.join(WAIT_S)


# --- versions -----------------------------------------------------------------------------------------


class Versions:
    """The weights of every version, and what transformers says under them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "float32", tuple(p.shape)) for name, p in self._model.named_parameters()]

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(version)
        return [
            (name, p.detach() + 0.3 * p.std() * torch.randn(p.shape, generator=generator))
            for name, p in self._model.named_parameters()
        ]

    def distance(self, version: int, logprobs: list[float]) -> float:
        ids = torch.tensor([IDS])
        with torch.no_grad():
            logits = torch.func.functional_call(self._model, dict(self.weights(version)), (ids,)).logits
        expected = torch.log_softmax(logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        return float((torch.tensor(logprobs) - expected).abs().max())


# --- the kills ----------------------------------------------------------------------------------------


def measure(folder: Path, kills: int, backend: str, seed: int) -> bool:
    """Print a row per kill; True if all went well."""
    from tests.tiny import tiny_model

    model = tiny_model(folder / "model")
    versions = Versions(model)
    keys = CurveKeys(*zmq.curve_keypair(), *zmq.curve_keypair())
    config = RunConfig.model_validate({"weightsync": {"backend": backend, "timeout_s": WAIT_S}})
    table = Table(title=f"{kills} kills around updates, backend {backend}")
    for column in ("version", "killed", "after", "other has it after", "its max |d|", "left", "right"):
        table.add_column(column, justify="right")
    fine = True
    with ExitStack() as stack:
        publisher = stack.enter_context(
            closing(Publisher(spec_of(config, folder), versions.metadata(), keys))
        )

        def start(number: int) -> Actor:
            actor = Actor(model, f"actor-{number}", publisher.endpoint, keys)
            return stack.enter_context(closing(actor))

        pair = [start(0), start(1)]
        for actor in pair:
            actor.hear(START_S)
        took = update(publisher, versions, 1, pair[0])
        rng = random.Random(seed)
        for version in range(2, kills + 2):
            row, good = kill_in_update(publisher, versions, version, pair, rng, took)
            pair = [pair[1], start(version)]  # the one that was spared is next
            pair[1].hear(START_S)
            fine = fine and good
            table.add_row(*row, "yes" if good else "NO")
        update(publisher, versions, kills + 2, pair[1])
        publisher.wait_idle(WAIT_S)
    Console(width=110).print(table)
    return fine


def update(publisher: Publisher, versions: Versions, version: int, actor: Actor) -> float:
    """Publish and wait until the actor has it; seconds."""
    started = time.monotonic()
    publisher.publish(version, versions.weights(version))
    actor.pipe.send(version)
    actor.hear(WAIT_S)
    return time.monotonic() - started


def kill_in_update(
    publisher: Publisher, versions: Versions, version: int, pair: list[Actor], rng: random.Random, took: float
) -> tuple[list[str], bool]:
    victim, other = pair
    processes = victim.processes()
    whole = rng.random() < 0.5
    after = rng.uniform(0, 1.5 * took)
    started = time.monotonic()
    publisher.publish(version, versions.weights(version))
    other.pipe.send(version)
    time.sleep(after)
    engine = next(process for process in processes if "EngineCor" in process.name())
    (processes[0] if whole else engine).kill()
    reached, logprobs = other.hear(WAIT_S)
    seconds = time.monotonic() - started
    distance = versions.distance(version, logprobs)
    _, left = psutil.wait_procs(processes[1:], timeout=WAIT_S)
    victim.process.join(WAIT_S)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    gone = not left and not victim.process.is_alive()
    row = [
        str(version),
        "actor" if whole else "engine",
        f"{after:.2f} s",
        f"{seconds:.2f} s",
        f"{distance:.1e}",
        str(len(left)),
    ]
    return row, gone and reached == version and distance < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backend", default="auto", help="weightsync.backend")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sys.exit(not measure(Path(folder), options.kills, options.backend, options.seed))


if __name__ == "__main__":
    main()
