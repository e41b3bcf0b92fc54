"""Small trajectories, batches and settings for the learner's tests."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from buffer.messages import Batch, StopReason, Trajectory, Turn
from configs.schema import LearnerConfig, RunConfig
from learner.batch import BatchSettings

VOCABULARY = 300


def trajectory(
    group: int,
    index: int,
    prompt: Sequence[int],
    rest: Sequence[int],
    mask: Sequence[int],
    *,
    reward: float | None = 0.0,
    logprobs: Sequence[float] | None = None,
    stop_reason: str = StopReason.ANSWER,
    version: int = 0,
) -> Trajectory:
    """`mask` is that of `rest`; the prompt's is 0. Behaviour logprobs default to -1 where the mask is 1."""
    action_mask = np.array([0] * len(prompt) + list(mask), dtype=np.uint8)
    behaviour = np.where(action_mask, -1.0, 0.0) if logprobs is None else np.array(logprobs)
    return Trajectory(
        trajectory_id=f"g{group}/{index}",
        group_id=f"g{group}",
        index=index,
        lease_id="lease",
        actor="actor-0",
        task="test",
        prompt_index=group,
        prompt_len=len(prompt),
        token_ids=np.array([*prompt, *rest], dtype=np.int32),
        action_mask=action_mask,
        logprobs=behaviour.astype(np.float32),
        versions=np.where(action_mask, version, -1).astype(np.int32),
        turns=(),
        stop_reason=stop_reason,
        reward=reward,
    )


def turns(t: Trajectory, spans: Sequence[tuple[int, int, int]], rewards: Sequence[float] = ()) -> Trajectory:
    """`t` with turns at these (start, end, observation_end)."""
    earned = [*rewards, *[0.0] * (len(spans) - len(rewards))]
    made = tuple(Turn(*span, "stop", reward=reward) for span, reward in zip(spans, earned, strict=True))
    return dataclasses.replace(t, turns=made)


def random_batch(
    groups: int = 3, members: int = 3, prompt: int = 12, seed: int = 0, step: int = 1, examples: int = 0
) -> Batch:
    """Groups with a shared prompt and continuations of uneven length: call, observation, answer.

    All prompts begin with the same `examples` tokens.
    """
    rng = np.random.default_rng(seed)
    root = rng.integers(3, VOCABULARY, examples)
    made = []
    for group in range(groups):
        prompt_ids = np.concatenate([root, rng.integers(3, VOCABULARY, prompt + group)])
        group_members = []
        for index in range(members):
            call, observation, answer = rng.integers(2, 6, 3)
            mask = [1] * call + [0] * observation + [1] * answer
            group_members.append(
                trajectory(
                    group,
                    index,
                    prompt_ids.tolist(),
                    rng.integers(3, VOCABULARY, len(mask)).tolist(),
                    mask,
                    reward=float(rng.random()),
                    logprobs=[0.0] * len(prompt_ids) + [-5.7 * m for m in mask],
                )
            )
        made.append(tuple(group_members))
    return Batch(step=step, version=0, groups=tuple(made))


def poisoned(batch: Batch, value: float = float("nan")) -> Batch:
    """The first group's first action token carries a logprob that is no number."""
    first = batch.groups[0][0]
    logprobs = first.logprobs.copy()
    logprobs[np.flatnonzero(first.action_mask)[0]] = value
    changed = (dataclasses.replace(first, logprobs=logprobs), *batch.groups[0][1:])
    return dataclasses.replace(batch, groups=(changed, *batch.groups[1:]))


def learner_config(**changes: object) -> LearnerConfig:
    return LearnerConfig.model_validate({"tokens_per_microbatch": 4096} | changes)


def settings(world: int = 1, max_sequence_tokens: int = 32, **learner: object) -> BatchSettings:
    """Of a plan, with these learner settings."""
    return BatchSettings(learner_config(**learner), max_sequence_tokens, world, hidden_size=64)


def run_config(dtype: str = "float32", **learner: object) -> RunConfig:
    """A run at temperature 1 with these learner settings."""
    sft = {"data": "demos.jsonl"} if learner.get("policy_loss") == "sft" else {}
    sections = {"model": {"dtype": dtype}, "learner": {"lr": 1e-3, **learner}, "sft": sft}
    return RunConfig.model_validate(sections)
