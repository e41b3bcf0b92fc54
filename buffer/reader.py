"""Reading trajectories out of a run's store, while it runs or afterwards.

Opens the store read-only; the server's transactions are untouched. Called by `launch.py show` and
`export-trajectories`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from buffer.codec import decode_trajectory
from buffer.messages import Trajectory

READ_TIMEOUT_S = 10.0


class NoSuchTrajectory(LookupError):
    """Nothing in the store answers; the text says what was looked for and what to do."""


def read_trajectories(store: Path, min_reward: float) -> Iterator[Trajectory]:
    """Stored trajectories with at least that reward, best first. Raises NoSuchTrajectory without a store."""
    query = (
        "SELECT payload FROM trajectories WHERE reward >= ? AND payload IS NOT NULL "
        "ORDER BY reward DESC, number"
    )
    with closing(_open(store)) as connection:
        for (payload,) in connection.execute(query, (min_reward,)):
            yield decode_trajectory(payload)


def read_trajectory(store: Path, trajectory_id: str | None = None) -> Trajectory:
    """The trajectory with that id, or the newest one that used a tool. Raises NoSuchTrajectory."""
    where, values = "turns > 1", ()
    if trajectory_id is not None:
        where, values = "trajectory_id = ?", (trajectory_id,)
    query = (
        f"SELECT payload FROM trajectories WHERE {where} AND payload IS NOT NULL ORDER BY number DESC LIMIT 1"
    )
    with closing(_open(store)) as connection:
        row = connection.execute(query, values).fetchone()
    if row is None:
        what = f"trajectory {trajectory_id!r}" if trajectory_id else "a trajectory with a tool call"
        raise NoSuchTrajectory(
            f'{store} holds no {what}, or it was trained and pruned (buffer.keep = "all" keeps them)'
        )
    return decode_trajectory(row[0])


def _open(store: Path) -> sqlite3.Connection:
    if not store.exists():
        raise NoSuchTrajectory(f"{store} does not exist; name the folder of a run that has started")
    return sqlite3.connect(f"file:{store.resolve()}?mode=ro", uri=True, timeout=READ_TIMEOUT_S)
