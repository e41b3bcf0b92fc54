"""How far a judge agrees with people: its values beside known scores, before it trains anything.

    python launch.py calibrate --config my_task.toml --data calibration.jsonl

Each row has the fields of a data row, a `response` to judge, and a `score` from 0 to 1 that people gave it.
Called by `launcher.commands`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tasks.readers import BadData, PlacedRow
from tasks.scoring import score
from tasks.types import Episode, Reward, Task
from tasks.usage import usage

PASSES_AT = 0.5  # for agreement: a value is a yes from here on
CONCURRENCY = 64


@dataclass(frozen=True)
class Report:
    """`pearson` and `spearman`: correlation with people. `agreement`: share of equal yes or no at 0.5;
    `kappa` is that share beyond chance (Cohen 1960). None where a side has no spread."""

    scored: int
    pearson: float | None
    spearman: float | None
    agreement: float
    kappa: float | None
    mean_judge: float
    mean_people: float
    unscored: dict[str, int] = field(default_factory=dict)  # by reason
    used: dict[str, float] = field(default_factory=dict)  # requests, tokens, seconds, cost


def calibrate(task: Task, reward: Reward, rows: Sequence[PlacedRow]) -> Report:
    """Ask `reward` about every row. Raises BadData if a row lacks `response` or `score`."""
    for placed in rows:
        for name in ("response", "score"):
            if name not in placed.row:
                raise BadData(
                    f"{placed.place}: no {name!r}; a calibration row has response and score (0 to 1)"
                )
    people = [_score(placed) for placed in rows]
    usage.take()
    scores = asyncio.run(_ask(task, reward, [placed.row for placed in rows]))
    pairs = [(s.components[reward.name], p) for s, p in zip(scores, people, strict=True) if s.error is None]
    unscored = Counter(s.error for s in scores if s.error is not None)
    return report([j for j, _ in pairs], [p for _, p in pairs], dict(unscored), usage.take())


def report(
    judge: Sequence[float], people: Sequence[float], unscored: dict[str, int], used: dict[str, float]
) -> Report:
    ours, theirs = np.asarray(judge, dtype=float), np.asarray(people, dtype=float)
    yes, truth = ours >= PASSES_AT, theirs >= PASSES_AT
    agreement = float((yes == truth).mean()) if ours.size else 0.0
    return Report(
        scored=ours.size,
        pearson=_correlation(ours, theirs),
        spearman=_correlation(_ranks(ours), _ranks(theirs)),
        agreement=agreement,
        kappa=_kappa(yes, truth, agreement) if ours.size else None,
        mean_judge=float(ours.mean()) if ours.size else 0.0,
        mean_people=float(theirs.mean()) if ours.size else 0.0,
        unscored=unscored,
        used=used,
    )


async def _ask(task: Task, reward: Reward, rows: Sequence[dict[str, Any]]):
    gate = asyncio.Semaphore(CONCURRENCY)

    reward = replace(reward, weight=1.0)  # one of weight 0 is only recorded: it would fail without a reason

    async def one(row: dict[str, Any]):
        episode = Episode(row, tuple(task.make_messages(row)), (str(row["response"]),), ((),), "answer")
        async with gate:
            return await score([reward], episode)

    return await asyncio.gather(*(one(row) for row in rows))


def _score(placed: PlacedRow) -> float:
    try:
        value = float(placed.row["score"])
    except (TypeError, ValueError):
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise BadData(f"{placed.place}: score = {placed.row['score']!r} must be a number from 0 to 1")
    return value


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places, equal values sharing the mean of theirs."""
    ordered = np.sort(values)
    first, last = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (first + last - 1) / 2


def _kappa(a: np.ndarray, b: np.ndarray, agreement: float) -> float | None:
    chance = a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean())
    return float((agreement - chance) / (1 - chance)) if chance < 1 else None
