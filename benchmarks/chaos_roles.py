"""The processes that `benchmarks/chaos.py` kills: the launcher's real supervisor over plain processes, the
real buffer, actors whose engine is a random generator, a learner whose model is a vector (or the real one).

    python -m benchmarks.chaos_roles RUN_DIR        # what the chaos calls the launcher; again to resume

Everything between the roles is Slipstream's own: sockets, keys, store, leases, supervision, guards.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from buffer.client import AsyncBufferClient, BufferClient
from buffer.messages import (
    Batch,
    Checkpointed,
    CommitStep,
    GetBatch,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    PutTrajectory,
    Resume,
    Trajectory,
    Turn,
)
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from launcher import supervisor
from launcher.buffer_link import BufferLink
from launcher.guard import start_guard
from launcher.interfaces import Died, Done, End, Event, Poll, Running
from launcher.preflight import free_port

CALL_S = 60.0
TICK_S = 0.05
VOCABULARY = 300
SPAWN = multiprocessing.get_context("spawn")


# --- roles as plain processes -----------------------------------------------------------------------


def enter(main: str, spec: RoleSpec, launcher: int) -> None:
    """A role's process: ends with the launcher, writes its log, calls its main."""
    start_guard(launcher, [os.getpid()])
    log = os.open(
        RunFolder(spec.run_dir).logs / f"{spec.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, function = main.split(":")
    getattr(import_module(module), function)(spec)


class ProcessRoles:
    """`launcher.interfaces.Roles` without Ray, whose start-up would be most of the chaos."""

    def __init__(self, run_dir: Path, mains: dict[str, str]) -> None:
        self._run_dir, self._mains = run_dir, mains

    def start(self, spec: RoleSpec) -> Any:
        process = SPAWN.Process(target=enter, args=(self._mains[spec.role], spec, os.getpid()))
        process.start()
        (self._run_dir / "pids" / spec.name).write_text(str(process.pid))
        return process

    def poll(self, handle: Any) -> Poll:
        if handle.exitcode is None:
            return Running()
        return Done() if handle.exitcode == 0 else Died(f"exit code {handle.exitcode}")

    def kill(self, handle: Any) -> None:
        handle.kill()
        handle.join(CALL_S)

    def room(self, specs: Sequence[RoleSpec]) -> int:
        return len(specs)

    def rendezvous(self) -> str:
        return f"127.0.0.1:{free_port('127.0.0.1')}"


def launch(run_dir: Path) -> int:
    """Supervise the run to its end; the exit code."""
    # Kills come every second here, not every hour: no budget and no growing delays.
    supervisor.MAX_BUFFER_RESTARTS = sys.maxsize
    supervisor.STEADY_S = 0.0
    specs, mains = pickle.loads((run_dir / "specs.pickle").read_bytes())  # our own file, made by the chaos
    folder = RunFolder(run_dir)

    def say(event: Event) -> None:
        with folder.events.open("a") as events:
            events.write(json.dumps({"time": time.time(), "event": event.kind, "text": event.text}) + "\n")

    with closing(BufferLink(specs[0].buffer_endpoint, folder.read_keys())) as buffer:
        watching = supervisor.Supervisor(
            specs, ProcessRoles(run_dir, mains), buffer, specs[0].config, time.monotonic, say, lambda _: None
        )
        while watching.tick():
            time.sleep(TICK_S)
    assert watching.outcome is not None
    print(watching.outcome.message, flush=True)
    return 0 if watching.outcome.end is End.FINISHED else 1


# --- the actor --------------------------------------------------------------------------------------


def act(spec: RoleSpec) -> None:
    asyncio.run(_act(spec, episode_s=0.05))


def act_slowly(spec: RoleSpec) -> None:
    """With episodes that take their time and no processor, as while a tool is waited for."""
    asyncio.run(_act(spec, episode_s=2.0))


async def _act(spec: RoleSpec, episode_s: float) -> None:
    buffer = AsyncBufferClient(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "actor", spec.name)
    await buffer.call(Hello("actor", spec.name), CALL_S)
    version, finished = 0, False
    while not finished:
        beat = await buffer.call(Heartbeat("actor", spec.name, version=version), CALL_S)
        version, finished = beat.version, beat.finished or beat.drain
        grant = await buffer.call(LeaseRequest(spec.name, 2, version), CALL_S)
        members = [(lease, index) for lease in grant.leases for index in lease.missing]
        await asyncio.gather(*(_member(buffer, spec, *one, version, episode_s) for one in members))
        if not grant.leases:
            await asyncio.sleep(min(grant.retry_after_s, TICK_S))
    await buffer.call(Heartbeat("actor", spec.name, version=version, state="finished"), CALL_S)
    await buffer.close()


async def _member(
    buffer: AsyncBufferClient, spec: RoleSpec, lease: Lease, index: int, version: int, episode_s: float
) -> None:
    await asyncio.sleep(random.uniform(0, episode_s))
    trajectory = roll(lease, index, version, spec.name)
    ack = await buffer.call(PutTrajectory(trajectory), CALL_S)
    if ack.stored or ack.duplicate:  # what the buffer has promised to keep
        with (spec.run_dir / "acked.txt").open("a") as acked:
            acked.write(trajectory.trajectory_id + "\n")


def roll(lease: Lease, index: int, version: int, actor: str) -> Trajectory:
    """An episode of noise."""
    rng = np.random.default_rng((lease.seed, index))
    prompt, sampled = 8, int(rng.integers(4, 24))
    mask = np.repeat(np.array([0, 1], np.uint8), [prompt, sampled])
    return Trajectory(
        trajectory_id=f"{lease.group_id}/{index}",
        group_id=lease.group_id,
        index=index,
        lease_id=lease.lease_id,
        actor=actor,
        task="chaos",
        prompt_index=lease.prompt_index,
        prompt_len=prompt,
        token_ids=rng.integers(3, VOCABULARY, prompt + sampled).astype("<i4"),
        action_mask=mask,
        logprobs=np.where(mask, -5.7, 0.0).astype("<f4"),
        versions=np.where(mask, version, -1).astype("<i4"),
        turns=(Turn(prompt, prompt + sampled, prompt + sampled, "stop"),),
        stop_reason="answer",
        reward=float(rng.normal()),
    )


# --- the learner ------------------------------------------------------------------------------------


def learn(spec: RoleSpec) -> None:
    """The protocol of `learner.learner` around a vector: every batch, in order, changes all of it."""
    folder, config = RunFolder(spec.run_dir), spec.config
    with closing(
        BufferClient(spec.buffer_endpoint, folder.read_keys(), "learner", f"{spec.name}/main")
    ) as buffer:
        step, weights = _latest(folder.checkpoints)
        buffer.call(Resume(step, step), CALL_S)
        _beat(buffer, spec, step, "running")
        while step < config.learner.steps:
            batch = None
            while batch is None:
                batch = buffer.call(GetBatch(step + 1, 0.5), CALL_S).batch
                _beat(buffer, spec, step, "running")
            step, weights = step + 1, updated(weights, batch)
            time.sleep(random.uniform(0, 0.03))  # the moments at which a kill hurts
            buffer.call(CommitStep(step, step), CALL_S)
            if step % config.learner.checkpoint_every == 0 or step == config.learner.steps:
                _save(folder.checkpoints, step, weights)
                buffer.call(Checkpointed(step, max(0, step - config.learner.checkpoint_every)), CALL_S)
        np.save(spec.run_dir / "weights.npy", weights)
        _beat(buffer, spec, step, "finished")


def updated(weights: np.ndarray, batch: Batch) -> np.ndarray:
    for group in batch.groups:
        for one in group:
            change = np.zeros_like(weights)
            np.add.at(change, one.token_ids % len(weights), one.action_mask * (one.reward or 0.0))
            weights = np.tanh(0.99 * weights + change)
    return weights


def _beat(buffer: BufferClient, spec: RoleSpec, step: int, state: str) -> None:
    buffer.call(Heartbeat("learner", spec.name, version=step, state=state), CALL_S)


def _save(checkpoints: Path, step: int, weights: np.ndarray) -> None:
    checkpoints.mkdir(exist_ok=True)
    partial = checkpoints / "partial.npy"
    np.save(partial, weights)
    partial.rename(checkpoints / f"step-{step:06}.npy")


def _latest(checkpoints: Path) -> tuple[int, np.ndarray]:
    found = sorted(checkpoints.glob("step-*.npy"))
    if not found:
        return 0, np.zeros(64)
    return int(found[-1].stem.removeprefix("step-")), np.load(found[-1])


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1])))
