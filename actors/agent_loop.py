"""One episode: generate, parse, invoke, update, until a StopReason.

Every episode that starts ends as exactly one `Trajectory`: an error of the episode (a tool server gone,
a deadline, a renderer that cannot go on, a reward that raises) is recorded on it, never a reward of 0.
Only `EngineDied` and cancellation leave this module. The engine, the renderer and the executor are
injected; nothing here knows vLLM. Called by `actors.actor` and `actors.evaluator`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.engine import Engine, EngineDied, Sampled, Sampling
from actors.recorder import Recorder
from actors.renderer import Renderer
from buffer.messages import Lease, StopReason, Trajectory
from configs.schema import RunConfig, TaskConfig
from tasks.mixture import Mixture
from tasks.scoring import score, score_group
from tasks.types import Episode, Message, Row, Score, Task
from toolcall.executor import Executor
from toolcall.health import NOT_THERE
from toolcall.lane import Limits
from toolcall.output import shorten
from toolcall.types import ParsedTurn, ToolContext, ToolResult

logger = logging.getLogger(__name__)

CLEAN_UP_TIMEOUT_S = 10.0
_NOT_WHOLE = "a reward sees the group, but an actor died after it had put some of its members"
MIN_TURN_TOKENS = 8  # with less room than this a further turn is not worth starting


@dataclass(frozen=True)
class Rollouts:
    """What every episode of an actor shares."""

    task: Task
    limits: TaskConfig
    engine: Engine
    renderer: Renderer
    executor: Executor
    sampling: Sampling  # `max_tokens` is replaced by what the limits leave
    actor: str = "actor"

    @classmethod
    def of(
        cls,
        config: RunConfig,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        actor: str,
        shared: Path | None = None,
    ) -> Rollouts:
        """As the config says: the one way in which training and evaluation set an episode up. shared: where
        the tools of a run's actors keep what they have in common."""
        sampling = Sampling(
            config.actors.temperature, 0, renderer.stop, renderer.stop_token_ids, config.actors.top_p
        )
        executor = Executor(
            task.tools,
            count_tokens=lambda text: len(renderer.plain(text)),
            limits=Limits(down_share=config.actors.pause_at_tool_failures),
            shared=shared,
        )
        return cls(task, config.task, engine, renderer, executor, sampling, actor)

    def of_row(self, row: Row) -> Rollouts:
        """For an episode of this row, which may offer tools of its own."""
        if self.task.offered is None:
            return self
        return replace(self, renderer=self.renderer.offering(self.task.tools_of(row)))


def mixed_rollouts(
    config: RunConfig,
    mixture: Mixture,
    engine: Engine,
    renderers: Sequence[Renderer],
    actor: str,
    shared: Path | None = None,
) -> list[Rollouts]:
    """One for each task of the run: its own tools, syntax and limits, the same engine."""
    return [
        Rollouts.of(
            config.model_copy(update={"task": part.limits}), part.task, engine, renderer, actor, shared
        )
        for part, renderer in zip(mixture.parts, renderers, strict=True)
    ]


@dataclass
class _State:
    """One episode while it runs."""

    row: Row
    messages: list[Message]
    recorder: Recorder
    context: ToolContext
    turns: list[str] = field(default_factory=list)
    results: list[tuple[ToolResult, ...]] = field(default_factory=list)
    parsed: list[ParsedTurn] = field(default_factory=list)
    generate_s: float = 0.0
    tools_s: float = 0.0
    observed: int = 0  # observation tokens so far
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """A trajectory and what it looks like as text. `success` is the task's own measure."""

    trajectory: Trajectory
    episode: Episode
    success: bool


async def run_episode(
    rollouts: Rollouts, lease: Lease, index: int, row: Row, on_rolled: Callable[[], None] = lambda: None
) -> Finished:
    """Roll member `index` of the leased group out and score it by the rewards that need no other member.

    `on_rolled` is called when the engine is done with it: what follows waits for rewards only.
    """
    task, rollouts = rollouts.task, rollouts.of_row(row)
    messages = task.make_messages(row)
    state = _State(
        row=row,
        messages=messages,
        recorder=Recorder(rollouts.renderer.prompt(messages)),
        context=tool_context(lease, index, row, task),
    )
    try:
        stop_reason, error = await _roll(rollouts, state)
        on_rolled()
        episode = Episode(
            row=row,
            messages=tuple(messages),
            turns=tuple(state.turns),
            results=tuple(state.results),
            stop_reason=stop_reason,
            num_tokens=state.recorder.num_sampled,
            parsed=tuple(state.parsed),
            context=state.context,
        )
        scored = Score(None, error=error) if error else await score(task.rewards, episode)
    finally:
        await clean_up(rollouts.executor, state.context)  # after the rewards, which may look at tools
    success, scored = with_success(task, episode, scored)
    trajectory = state.recorder.finish(
        lease,
        index,
        actor=rollouts.actor,
        task=task.name,
        stop_reason=stop_reason,
        reward=scored.reward,
        reward_components=scored.components,
        error=scored.error,
        metrics={
            "success": float(success),
            "generate_s": state.generate_s,
            "tools_s": state.tools_s,
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens,
        },
        spans=state.context.spans,
        turn_rewards=scored.turn_rewards,
    )
    return Finished(trajectory, episode, success)


def with_success(task: Task, episode: Episode, scored: Score, whole: bool = False) -> tuple[bool, Score]:
    """The task's own measure of an episode whose rewards are all known: not of an unscored one nor, unless
    the `whole` group is scored, where a reward waits for the others. A measure that raises leaves the
    trajectory unscored, as a reward does."""
    waits = not whole and any(reward.sees_group for reward in task.rewards)
    if scored.error is not None or waits:
        return False, scored
    try:
        return bool(task.success(episode)), scored
    except Exception as caught:  # noqa: BLE001 - a user's code: data, see above
        reason = f"task.success: {type(caught).__name__}: {caught}"
        return False, replace(scored, reward=None, error=reason)


async def score_members(task: Task, members: Sequence[Finished], whole: bool = True) -> list[Finished]:
    """The members of one group with the values of the rewards that see the group, in the same order.

    Not `whole`: some were put by an actor that died before the others, so nothing can be compared.
    """
    scores = [Score(m.trajectory.reward, m.trajectory.reward_components, m.trajectory.error) for m in members]
    if whole:
        scores = await score_group(task.rewards, [member.episode for member in members], scores)
    else:
        scores = [replace(score, reward=None, error=score.error or _NOT_WHOLE) for score in scores]
    return [_with_score(task, member, scored) for member, scored in zip(members, scores, strict=True)]


def _with_score(task: Task, member: Finished, scored: Score) -> Finished:
    if member.trajectory.error is not None:
        return member
    success, scored = with_success(task, member.episode, scored, whole=True)
    trajectory = replace(
        member.trajectory,
        reward=scored.reward,
        reward_components=scored.components,
        error=scored.error,
        metrics=member.trajectory.metrics | {"success": float(success)},
    )
    return Finished(trajectory, member.episode, success)


async def _roll(rollouts: Rollouts, state: _State) -> tuple[StopReason, str | None]:
    """Turn after turn to the end: why it ended, and the episode's error if it has one."""
    limits = rollouts.limits
    deadline = asyncio.timeout(limits.trajectory_timeout_s)
    try:
        async with deadline:
            stop_reason = await _turns(rollouts, state)
    except EngineDied:
        raise
    except Exception as caught:  # noqa: BLE001 - an episode error is data: the group survives it
        if deadline.expired():
            return (
                StopReason.DEADLINE,
                f"no end within {limits.trajectory_timeout_s:g} s (task.trajectory_timeout_s)",
            )
        return StopReason.ERROR, f"{type(caught).__name__}: {caught}"
    return stop_reason, infrastructure_error(state.results)


async def clean_up(executor: Executor, context: ToolContext) -> None:
    """Close what tools opened for this trajectory. A clean-up that fails is the tool's loss, not the
    episode's: it is reported, and the score stands."""
    try:
        async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
            await executor.finish(context)
    except Exception as caught:  # noqa: BLE001 - see above
        logger.warning("%s: clean-up of a tool failed: %r", context.trajectory_id, caught)


async def _turns(rollouts: Rollouts, state: _State) -> StopReason:
    limits = rollouts.limits
    for turn in range(1, limits.max_turns + 1):
        room = limits.max_trajectory_tokens - len(state.recorder.token_ids)
        if room < MIN_TURN_TOKENS:
            return StopReason.CONTEXT_LENGTH
        parsed, truncated, prompt_ids = await _generate(rollouts, state, turn, room)
        if truncated:
            return StopReason.MAX_TOKENS
        if not parsed.calls:
            return StopReason.ANSWER
        if turn == limits.max_turns:
            break
        started = time.monotonic()
        results = await rollouts.executor.run(parsed, state.context)
        state.tools_s += time.monotonic() - started
        state.results[-1] = results
        if not _observe(rollouts, state, prompt_ids, results):
            return StopReason.CONTEXT_LENGTH
    return StopReason.MAX_TURNS


async def _generate(
    rollouts: Rollouts, state: _State, turn: int, room: int
) -> tuple[ParsedTurn, bool, list[int]]:
    """One turn: what the model called, whether the turn was cut, and the ids before it."""
    prompt_ids = list(state.recorder.token_ids)
    limit = min(room, rollouts.limits.max_tokens_per_turn)
    request = f"{state.context.trajectory_id}#{turn}"
    started = time.monotonic()
    sampled = await _sample(rollouts, prompt_ids, limit, request)
    parsed = _parse(rollouts, prompt_ids, sampled)
    while not parsed.calls and _ends_in_stop_string(rollouts, sampled):
        # A stop string that completed no call, as in "I could write </search>" while thinking: go on.
        left = limit - len(sampled.token_ids)
        if left < 1:
            sampled = replace(sampled, finish_reason="length")
            break
        so_far = prompt_ids + sampled.token_ids
        more = await _sample(rollouts, so_far, left, f"{request}+{len(sampled.token_ids)}")
        sampled = sampled.followed_by(more)
        parsed = _parse(rollouts, prompt_ids, sampled)
    state.generate_s += time.monotonic() - started
    state.prompt_tokens += sampled.prompt_tokens
    state.cached_tokens += sampled.cached_tokens
    state.recorder.add_sampled(sampled)
    state.turns.append(rollouts.renderer.text(sampled.token_ids))
    state.parsed.append(parsed)
    state.results.append(())
    return parsed, sampled.finish_reason == "length", prompt_ids


async def _sample(rollouts: Rollouts, ids: list[int], max_tokens: int, request: str) -> Sampled:
    return await rollouts.engine.generate(ids, replace(rollouts.sampling, max_tokens=max_tokens), request)


def _parse(rollouts: Rollouts, prompt_ids: list[int], sampled: Sampled) -> ParsedTurn:
    cut = sampled.finish_reason == "length"
    return rollouts.renderer.parse(prompt_ids, sampled.token_ids, truncated=cut)


def _ends_in_stop_string(rollouts: Rollouts, sampled: Sampled) -> bool:
    """Does a stop string end within the last token?"""
    ids = sampled.token_ids
    if sampled.finish_reason != "stop" or not ids or ids[-1] in rollouts.renderer.stop_token_ids:
        return False
    text, before = rollouts.renderer.text(ids), len(rollouts.renderer.text(ids[:-1]))
    return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in rollouts.renderer.stop)


def _observe(rollouts: Rollouts, state: _State, prompt_ids: list[int], results: Sequence[ToolResult]) -> bool:
    """Append the observation, its tool text cut to the room there is. False: not even a cut one fits."""
    recorder = state.recorder
    limits = rollouts.limits
    room = min(
        limits.max_observation_tokens,
        limits.max_trajectory_tokens - len(recorder.token_ids) - MIN_TURN_TOKENS,
    )
    if limits.max_total_observation_tokens:
        room = min(room, limits.max_total_observation_tokens - state.observed)
    sampled_ids = recorder.token_ids[len(prompt_ids) :]
    ids = fit_observation(rollouts.renderer, prompt_ids, sampled_ids, results, room)
    if ids is None:
        return False
    state.observed += len(ids)
    recorder.add_observation(ids, results)
    return True


def fit_observation(
    renderer: Renderer,
    prompt_ids: Sequence[int],
    sampled_ids: Sequence[int],
    results: Sequence[ToolResult],
    room: int,
) -> list[int] | None:
    """The observation's ids, at most `room` of them, by cutting the longest result text and saying so.
    None if even empty results do not fit."""
    keep = [len(result.text) for result in results]
    while True:
        shown = [
            replace(result, text=shorten(result.text, length, result.keep))
            for result, length in zip(results, keep, strict=True)
        ]
        ids = renderer.observation(prompt_ids, sampled_ids, shown)
        if len(ids) <= room:
            return ids
        longest = keep.index(max(keep))
        if keep[longest] == 0:
            return None
        keep[longest] = int(keep[longest] * min(0.9, max(room, 0) / len(ids)))


def tool_context(lease: Lease, index: int, row: Row, task: Task) -> ToolContext:
    """What the tools of member `index` are told."""
    return ToolContext(
        trajectory_id=f"{lease.group_id}/{index}",
        group_id=lease.group_id,
        sample_index=index,
        row=row,
        rng=random.Random(f"{lease.seed}/{index}"),
        offered={tool.name: tool for tool in task.tools_of(row)},
    )


def infrastructure_error(results: Sequence[Sequence[ToolResult]]) -> str | None:
    """A tool whose server is gone says nothing about the policy: such a trajectory is not scored."""
    for of_turn in results:
        for result in of_turn:
            if result.outcome in NOT_THERE:
                return f"tool {result.name}: {result.text}"
    return None
