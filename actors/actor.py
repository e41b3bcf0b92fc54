"""The rollout role: lease groups, roll their members out, put each trajectory as it ends.

An actor holds no state that matters: what it has leased and not put goes to others when it dies.
Four tasks run side by side: rollouts, heartbeats, weights, and one per episode. The first to fail ends
the actor with its cause. Started by Ray through `main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.admission import Admission
from actors.agent_loop import Finished, Rollouts, mixed_rollouts, run_episode, score_members
from actors.renderer import load_tokenizer, make_renderers
from actors.tool_pause import AllTools, ToolPause
from actors.vllm_engine import VllmEngine
from buffer.client import AsyncBufferClient
from buffer.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    PutTrajectory,
    ReturnLeases,
    Trajectory,
)
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from metrics import names
from metrics.record import Recorder
from tasks.mixture import load_mixture
from tasks.types import Row
from tasks.usage import usage
from toolcall.watchdog import LoopWatchdog
from toolcall.work import run
from weightsync.receiver import Receiver
from weightsync.vllm_engine import VllmWeights

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0  # of one request to the buffer, restarts of the buffer included


def main(spec: RoleSpec) -> None:
    run(_main(spec))


async def _main(spec: RoleSpec) -> None:
    config = spec.config
    mixture = load_mixture(config.task, spec.config_dir, config.seed, spec.dropped_prompts)
    renderers = make_renderers(load_tokenizer(spec.model_path), mixture, config.model.renderer)
    for renderer in renderers:
        logger.info("%s", renderer.syntax)
    keys = RunFolder(spec.run_dir).read_keys()
    engine = await VllmEngine.start(
        config, spec.model_path, spec.device, spec.threads, seed=config.seed + spec.rank
    )
    client = AsyncBufferClient(spec.buffer_endpoint, keys, "actor", spec.name)
    receiver = Receiver(
        VllmWeights(engine.llm),
        keys,
        spec.name,
        config.weightsync.timeout_s,
        config.weightsync.kv_cache,
        probe_tolerance=config.weightsync.probe_tolerance,
    )
    shared = RunFolder(spec.run_dir).tools
    rollouts = mixed_rollouts(config, mixture, engine, renderers, spec.name, shared)
    tools = AllTools([each.executor for each in rollouts])
    try:
        await client.call(Hello("actor", spec.name), CALL_TIMEOUT_S)
        with LoopWatchdog(tools.note_blocked):
            held_out = mixture.held_out(config.eval.every_prompts)
            await Actor(rollouts, mixture.pick, client, receiver, spec, held_out).run()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first task to fail is the cause
    finally:
        await client.close()
        await tools.close()
        await engine.close()


class BufferCalls(Protocol):
    async def call(self, message: object, timeout_s: float) -> object: ...


class Weights(Protocol):
    """What the actor needs of `weightsync.receiver.Receiver`."""

    version: int

    @property
    def cache_salt(self) -> str | None: ...
    def set_endpoint(self, endpoint: str) -> None: ...
    async def run(self) -> None: ...
    def take_metrics(self) -> dict[str, float]: ...


@dataclass
class _Group:
    """A leased group and its episodes' tasks, by member index."""

    lease: Lease
    rollouts: Rollouts
    row: Row
    episodes: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    rolling: set[int] = field(default_factory=set)  # of them, those that still need the engine
    waiting: dict[int, Finished] = field(default_factory=dict)  # for the others, to be scored together


class Actor:
    def __init__(
        self,
        rollouts: Sequence[Rollouts],
        pick: Callable[[int, int], tuple[int, Row]],
        client: BufferCalls,
        weights: Weights,
        spec: RoleSpec,
        held_out: Sequence[tuple[int, Row]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rollouts: of each task of the run; `pick`: prompt index and epoch to a task's number and a row;
        `held_out`: the same of each prompt of an evaluation."""
        self._rollouts = rollouts
        self._pick, self._held_out = pick, held_out
        self._client = client
        self._weights = weights
        self._config = spec.config
        self._name = spec.name
        self._clock = clock
        self._groups: dict[str, _Group] = {}  # by lease id
        self._changed = asyncio.Event()  # a group ended, or drain or finish was heard
        self._drain = False
        self._finished = False
        self._admission = Admission(
            self._config.actors.max_groups_in_flight,
            self._config.actors.group_size,
            max(each.limits.max_trajectory_tokens for each in rollouts),
            rollouts[0].engine.kv_cache_tokens,
        )
        self._metrics = Recorder(names.ACTOR_WINDOW_S)
        self._all_tools = AllTools([each.executor for each in rollouts])
        self._tools = ToolPause(self._all_tools, clock)
        self._unscored: Counter[str] = Counter()  # trajectories by the reason's beginning
        self._idle_since: float | None = clock()

    async def run(self) -> None:
        """Until the run is finished or this actor is drained; leases left are handed back."""
        async with asyncio.TaskGroup() as tasks:
            weights = tasks.create_task(self._weights.run(), name="weights")
            beats = tasks.create_task(self._heartbeats(), name="heartbeats")
            await self._lease_and_roll(tasks)
            weights.cancel()
            beats.cancel()
            left = self._cancel_episodes()
        if left:
            await self._call(ReturnLeases(self._name, left))
        await self._call(self._heartbeat("finished"))

    # --- leases ----------------------------------------------------------------------------------

    async def _lease_and_roll(self, tasks: asyncio.TaskGroup) -> None:
        while not self._finished and not (self._drain and not self._groups):
            self._changed.clear()
            retry_after_s = self._config.buffer.heartbeat_s
            # Trajectories that only wait for rewards leave the engine to others, as do those that ended.
            free = self._admission.free_groups(sum(len(group.rolling) for group in self._groups.values()))
            free = await self._tools.allowed(free)
            if free and not self._drain:
                grant = await self._call(LeaseRequest(self._name, free, self._weights.version))
                assert isinstance(grant, LeaseGrant)
                for lease in grant.leases:
                    self._start_group(lease, tasks)
                if not grant.reason:
                    continue
                retry_after_s = grant.retry_after_s
            await self._wait_for_change(retry_after_s)

    async def _wait_for_change(self, timeout_s: float) -> None:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes with the event, and
        # the actor would outlive its dead engine.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _start_group(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        # One salt for all turns of all members: each turn finds the KV of the turn before even if weights
        # changed in between, and the group's prompt is prefilled once.
        number, row = self._row_of(lease)
        rollouts = self._rollouts[number]
        sampling = replace(rollouts.sampling, cache_salt=self._weights.cache_salt)
        if lease.kind == "eval":
            sampling = replace(sampling, temperature=0.0, logprobs=False)
        rollouts = replace(rollouts, sampling=sampling)
        group = self._groups[lease.lease_id] = _Group(lease, rollouts, row, rolling=set(lease.missing))
        for index in lease.missing:
            group.episodes[index] = tasks.create_task(
                self._roll(group, index), name=f"{lease.group_id}/{index}"
            )
        self._note_in_flight()

    def _row_of(self, lease: Lease) -> tuple[int, Row]:
        """Number of the task, and its row."""
        if lease.kind == "eval":
            return self._held_out[lease.prompt_index]
        return self._pick(lease.prompt_index, lease.epoch)

    async def _roll(self, group: _Group, index: int) -> None:
        lease = group.lease
        try:
            finished = await run_episode(
                group.rollouts, lease, index, group.row, lambda: self._rolled(group, index)
            )
            self._admission.observe(finished.trajectory.prompt_len, len(finished.trajectory.token_ids))
            for member in await self._scored(group, index, finished):
                if lease.kind != "eval":
                    self._count(member)
                await self._call(PutTrajectory(member.trajectory))
        finally:
            del group.episodes[index]
            if not group.episodes:
                self._groups.pop(lease.lease_id, None)
            self._note_in_flight()
            self._changed.set()

    def _rolled(self, group: _Group, index: int) -> None:
        group.rolling.discard(index)
        if not group.rolling:
            self._changed.set()

    async def _scored(self, group: _Group, index: int, finished: Finished) -> list[Finished]:
        """What may be put now: the member itself or, where a reward sees the group, all with the last."""
        task = group.rollouts.task
        if not any(reward.sees_group for reward in task.rewards):
            return [finished]
        group.waiting[index] = finished
        if len(group.waiting) < len(group.lease.missing):
            return []
        whole = len(group.lease.missing) == group.lease.group_size
        return await score_members(task, [group.waiting[i] for i in sorted(group.waiting)], whole)

    def _cancel_episodes(self) -> tuple[str, ...]:
        """Cancel what still runs; the leases it belonged to."""
        left = tuple(self._groups)
        for lease_id in left:
            self._cancel_group(lease_id)
        return left

    def _cancel_group(self, lease_id: str) -> None:
        group = self._groups.get(lease_id)
        for episode in list(group.episodes.values()) if group else ():
            episode.cancel()

    # --- heartbeats ------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while True:
            ack = await self._call(self._heartbeat(self._state()))
            assert isinstance(ack, HeartbeatAck)
            self._obey(ack)
            # Spread the beats of many actors.
            await asyncio.sleep(self._config.buffer.heartbeat_s * random.uniform(0.8, 1.0))

    def _state(self) -> str:
        if self._drain:
            return "draining"
        return f"paused: {self._tools.reason}" if self._tools.reason else "running"

    def _heartbeat(self, state: str) -> Heartbeat:
        return Heartbeat(
            role="actor",
            name=self._name,
            lease_ids=tuple(self._groups),
            version=self._weights.version,
            state=state,
            metrics=self._take_metrics(),
        )

    def _obey(self, ack: HeartbeatAck) -> None:
        if ack.publisher:
            self._weights.set_endpoint(ack.publisher)
        for lease_id in ack.lost:
            self._cancel_group(lease_id)
        self._drain = self._drain or ack.drain
        self._finished = self._finished or ack.finished
        if self._drain or self._finished:
            self._changed.set()

    # --- metrics ---------------------------------------------------------------------------------

    def _note_in_flight(self) -> None:
        now = self._clock()
        if self._groups and self._idle_since is not None:
            self._metrics.add(names.ACTOR_IDLE_S, now - self._idle_since)
            self._idle_since = None
        elif not self._groups and self._idle_since is None:
            self._idle_since = now

    def _take_metrics(self) -> dict[str, float]:
        now = self._clock()
        if self._idle_since is not None:
            self._metrics.add(names.ACTOR_IDLE_S, now - self._idle_since)
            self._idle_since = now
        self._metrics.set(names.ACTOR_IN_FLIGHT, sum(len(g.episodes) for g in self._groups.values()))
        self._metrics.add(names.ACTOR_TOOL_PAUSED_S, self._tools.take_paused_s())
        of_tools = self._all_tools.take_metrics()
        return self._metrics.take() | of_tools | usage.take() | self._weights.take_metrics()

    def _count(self, finished: Finished) -> None:
        for name, value in episode_metrics(finished.trajectory, finished.success).items():
            self._metrics.add(name, value)
        if error := finished.trajectory.error:
            kind = error[:40]  # names the reward or the tool; the rest may differ each time
            self._unscored[kind] += 1
            seen = self._unscored[kind]
            if seen & (seen - 1) == 0:  # at 1, 2, 4, 8, …: loud at first, and not a flood
                logger.warning("not scored (%d times so far): %s", seen, error)

    async def _call(self, message: object) -> object:
        return await self._client.call(message, CALL_TIMEOUT_S)


def episode_metrics(trajectory: Trajectory, success: bool) -> dict[str, float]:
    """What one trajectory adds to its actor's counters."""
    calls = [call for turn in trajectory.turns for call in turn.calls]
    scored = trajectory.reward is not None
    per_task = f"{names.TASK_PREFIX}{trajectory.task}"
    components = {
        f"{names.REWARD_PREFIX}{name}_{part}": amount
        for name, value in trajectory.reward_components.items()
        for part, amount in (("sum", value), ("count", 1.0))
    }
    return components | {
        f"{per_task}/trajectories": 1,
        f"{per_task}/success": float(success),
        f"{per_task}/scored": float(scored),
        f"{per_task}/reward_sum": trajectory.reward or 0.0,
        names.ACTOR_TRAJECTORIES: 1,
        names.ACTOR_SCORED: float(scored),
        names.ACTOR_ERRORS: float(not scored),
        names.ACTOR_REWARD_SUM: trajectory.reward or 0.0,
        names.ACTOR_SUCCESS: float(success),
        names.ACTOR_TOKENS: float(trajectory.action_mask.sum()),
        names.ACTOR_PROMPT_TOKENS: trajectory.metrics.get("prompt_tokens", 0.0),
        names.ACTOR_CACHED_TOKENS: trajectory.metrics.get("cached_tokens", 0.0),
        names.TOOL_CALLS: len(calls),
        names.TOOL_FAILURES: sum(call["outcome"] != "ok" for call in calls),
        names.TOOL_SECONDS: sum(call["ended"] - call["started"] for call in calls),
    }
