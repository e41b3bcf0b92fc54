"""The rows of evaluations in the store, and what they add up to.

Invariant: a result is written once. Called by `buffer.evaluations`, inside the transaction that is open. The
tables are in `buffer.schema`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.messages import Trajectory
from metrics import names
from metrics.estimates import mean_over_prompts


@dataclass(frozen=True)
class Opened:
    """An evaluation that goes on."""

    step: int
    version: int
    prompts: int


@dataclass(frozen=True)
class LeasedPrompt:
    prompt_index: int
    actor: str
    grants: int
    is_put: bool


class EvaluationRows:
    def __init__(self, sql: Callable[..., Any]) -> None:
        """sql: a connection's `execute`."""
        self._sql = sql

    # --- evaluations ----------------------------------------------------------------------------------

    def opened(self) -> Opened | None:
        query = "SELECT step, version, prompts FROM evaluations WHERE closed_at IS NULL"
        row = self._sql(query).fetchone()
        return Opened(*row) if row else None

    def has(self, step: int) -> bool:
        return self._sql("SELECT 1 FROM evaluations WHERE step = ?", (step,)).fetchone() is not None

    def open(self, opened: Opened) -> None:
        self._sql(
            "INSERT INTO evaluations (step, version, prompts, opened_at) VALUES (?, ?, ?, ?)",
            (opened.step, opened.version, opened.prompts, time.time()),
        )

    def close(self, step: int) -> None:
        self._sql("UPDATE evaluations SET closed_at = ? WHERE step = ?", (time.time(), step))

    def forget_after(self, step: int) -> None:
        """The weights of later steps are gone."""
        self._sql("DELETE FROM held_out WHERE step > ?", (step,))
        self._sql("DELETE FROM evaluations WHERE step > ?", (step,))

    # --- prompts --------------------------------------------------------------------------------------

    def lease(self, step: int, prompt_index: int, actor: str, grants: int) -> None:
        self._sql(
            "INSERT INTO held_out (step, prompt_index, actor, grants) VALUES (?1, ?2, ?3, ?4)"
            " ON CONFLICT DO UPDATE SET actor = ?3, grants = ?4",
            (step, prompt_index, actor, grants),
        )

    def leased(self, step: int) -> list[LeasedPrompt]:
        query = (
            "SELECT prompt_index, actor, grants, put_at NOTNULL FROM held_out"
            " WHERE step = ? ORDER BY prompt_index"
        )
        return [LeasedPrompt(*row[:3], is_put=bool(row[3])) for row in self._sql(query, (step,))]

    def put(self, step: int, prompt_index: int, trajectory: Trajectory) -> None:
        sampled = trajectory.versions[trajectory.action_mask.view(bool)]
        success = trajectory.metrics.get("success") if trajectory.error is None else None
        self._sql(
            "UPDATE held_out SET put_at = ?, actor = ?, task = ?, success = ?, reward = ?, stop_reason = ?,"
            " error = ?, action_tokens = ?, version_min = ?, version_max = ?"
            " WHERE step = ? AND prompt_index = ?",
            (
                *(time.time(), trajectory.actor, trajectory.task, success, trajectory.reward),
                *(trajectory.stop_reason, trajectory.error, len(sampled)),
                *((int(sampled.min()), int(sampled.max())) if len(sampled) else (None, None)),
                *(step, prompt_index),
            ),
        )

    def give_up(self, step: int, prompt_index: int, error: str) -> None:
        self._sql(
            "UPDATE held_out SET put_at = ?, error = ? WHERE step = ? AND prompt_index = ?",
            (time.time(), error, step, prompt_index),
        )

    def is_put(self, step: int, prompt_index: int) -> bool:
        query = "SELECT 1 FROM held_out WHERE step = ? AND prompt_index = ? AND put_at NOTNULL"
        return self._sql(query, (step, prompt_index)).fetchone() is not None

    # --- sums -----------------------------------------------------------------------------------------

    def counts(self) -> Counter[str]:
        """Prompts by where they are: done, running or dropped; and all that were leased."""
        places = self._sql(
            "SELECT CASE WHEN put_at NOTNULL THEN 'done'"
            " WHEN closed_at IS NULL THEN 'running' ELSE 'dropped' END,"
            " count(*) FROM held_out JOIN evaluations USING (step) GROUP BY 1"
        ).fetchall()
        return Counter(dict(places) | {"leased": sum(count for _, count in places)})

    def report(self, opened: Opened) -> dict[str, float]:
        """An evaluation's metrics, see `metrics.names`."""
        rows = self._sql(
            "SELECT task, success, reward, version_min, version_max FROM held_out"
            " WHERE step = ? AND put_at NOTNULL",
            (opened.step,),
        ).fetchall()
        scored = [row for row in rows if row[1] is not None]
        success = mean_over_prompts([row[1] for row in scored], proportion=True)
        metrics = {
            names.EVAL_STEP: float(opened.step),
            names.EVAL_VERSION: float(opened.version),
            names.EVAL_PROMPTS: float(len(scored)),
            names.EVAL_UNSCORED: float(len(rows) - len(scored)),
            names.EVAL_MISSING: float(opened.prompts - len(rows)),
        }
        if scored:
            metrics |= {
                names.EVAL_SUCCESS: success.mean,
                names.EVAL_LOW: success.low,
                names.EVAL_HIGH: success.high,
                names.EVAL_REWARD: _mean([row[2] for row in scored if row[2] is not None]),
            }
        if sampled := [row for row in scored if row[3] is not None]:
            metrics[names.EVAL_VERSION_MIN] = float(min(row[3] for row in sampled))
            metrics[names.EVAL_VERSION_MAX] = float(max(row[4] for row in sampled))
        tasks = {row[0] for row in scored}
        for task in tasks if len(tasks) > 1 else ():
            own = [row[1] for row in scored if row[0] == task]
            metrics[f"{names.EVAL_PREFIX}{task}/success"] = _mean(own)
        return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
