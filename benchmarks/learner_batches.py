"""Batches for the learner's benchmarks: a run's own trajectories, or made-up ones of given lengths."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from buffer.arrays import CodecError
from buffer.codec import decode_trajectory
from buffer.messages import Batch, Trajectory


def trajectory(group: int, index: int, prompt: np.ndarray, rest: np.ndarray, mask: np.ndarray) -> Trajectory:
    action_mask = np.concatenate([np.zeros(len(prompt)), mask]).astype(np.uint8)
    return Trajectory(
        trajectory_id=f"g{group}/{index}",
        group_id=f"g{group}",
        index=index,
        lease_id="",
        actor="",
        task="benchmark",
        prompt_index=group,
        prompt_len=len(prompt),
        token_ids=np.concatenate([prompt, rest]).astype(np.int32),
        action_mask=action_mask,
        logprobs=np.where(action_mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(action_mask, 0, -1).astype(np.int32),
        turns=(),
        stop_reason="answer",
        reward=float(index % 2),
    )


def made_up(
    groups: int,
    members: int,
    shared: int = 250,
    prompt: int = 300,
    rest: int | None = None,
    vocabulary: int = 40_000,
    seed: int = 0,
    lengths: tuple[tuple[int, int], ...] = ((8, 15), (3, 6), (4, 11)),  # of call, result and answer
) -> Batch:
    """Prompts that begin alike, each with a call, its result and an answer; or `rest` sampled tokens."""
    rng = np.random.default_rng(seed)
    root = rng.integers(100, vocabulary, shared)
    made = []
    for group in range(groups):
        question = np.concatenate([root, rng.integers(100, vocabulary, prompt - shared)])
        continuations = []
        for index in range(members):
            parts = [rng.integers(*bounds) for bounds in lengths]
            mask = np.repeat([1, 0, 1], parts) if rest is None else np.ones(rest)
            tokens = rng.integers(100, vocabulary, len(mask))
            continuations.append(trajectory(group, index, question, tokens, mask))
        made.append(tuple(continuations))
    return Batch(1, 0, tuple(made))


def like(task: str, groups: int, members: int) -> Batch:
    """The lengths of a shipped task: the calculator's, or search's shorter prompts and longer results."""
    if task == "search":
        return made_up(groups, members, shared=160, prompt=187, lengths=((8, 20), (30, 120), (4, 12)))
    return made_up(groups, members)


def uneven(groups: int, members: int) -> Batch:
    """Made up with prompts and answers of very different lengths."""
    rng = np.random.default_rng(1)
    made = []
    for group in range(groups):
        prompt = rng.integers(100, 40_000, rng.integers(50, 800))
        lengths = np.clip(rng.lognormal(3.5, 1.0, members), 2, 1500).astype(int)
        rests = [rng.integers(100, 40_000, length) for length in lengths]
        made.append(
            tuple(trajectory(group, i, prompt, rest, np.ones(len(rest))) for i, rest in enumerate(rests))
        )
    return Batch(1, 0, tuple(made))


def of_run(run: Path, groups: int, members: int) -> Batch:
    """The newest complete groups in a run's store."""
    store = sqlite3.connect(f"file:{run / 'buffer.sqlite'}?mode=ro", uri=True)
    query = (
        "SELECT group_id FROM trajectories WHERE payload IS NOT NULL AND reward IS NOT NULL "
        "GROUP BY group_id HAVING COUNT(*) >= ? ORDER BY MAX(number) DESC LIMIT ?"
    )
    ids = [row[0] for row in store.execute(query, (members, groups))]
    if len(ids) < groups:
        raise SystemExit(f"{run} holds {len(ids)} groups of {members}, not {groups}; lower --groups")
    of_group = "SELECT payload FROM trajectories WHERE group_id = ? ORDER BY member LIMIT ?"
    try:
        groups_of_run = tuple(
            tuple(decode_trajectory(payload) for (payload,) in store.execute(of_group, (group_id, members)))
            for group_id in ids
        )
    except CodecError as error:
        raise SystemExit(f"{run} was recorded by another version of Slipstream: {error}") from None
    return Batch(step=1, version=0, groups=groups_of_run)
