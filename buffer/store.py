"""The buffer's durable memory: one SQLite file in WAL mode in the run folder. Rows are facts.

Invariant: what was committed survives kill -9 and power loss (synchronous=FULL); the server acks after
`commit`. A batch's groups never change once bound. Every write runs inside the transaction that `begin`
opened; one thread uses a store. Called by `buffer.broker` and `buffer.batches`; `buffer.server` begins and
commits. The tables are in `buffer.schema`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from buffer.evaluation_rows import EvaluationRows
from buffer.groups import COMPLETE, Group, ReadyGroup
from buffer.leases import Held
from buffer.ledger import Places
from buffer.messages import DropReason, Trajectory
from buffer.schema import SCHEMA, SCHEMA_VERSION

PAGE_BYTES = 16_384  # a 2,000-token payload then takes two overflow pages; the fastest of 4, 16 and 64 KiB
WAL_PAGES = 2_000  # 32 MiB between checkpoints of the WAL
ROWS_PER_INSERT = 32


class StoreError(RuntimeError):
    """The store cannot serve this run; one sentence with the mend."""


@dataclass(frozen=True)
class BatchRow:
    step: int
    version: int
    mask_below: int | None


@dataclass(frozen=True)
class Payload:
    """An encoded trajectory and its oldest sampled token's version."""

    version_min: int | None
    data: bytes | None  # None: pruned


@dataclass(frozen=True)
class OpenLease:
    lease_id: str
    group_id: str
    actor: str


_PUT_COLUMNS = (
    "group_id, member, lease_id, actor, task, stop_reason, reward, error, prompt_tokens, action_tokens,"
    " tokens, turns, version_min, version_max, put_at, payload"
)


@cache
def _insert_puts(rows: int) -> str:
    marks = "(" + ", ".join("?" * (_PUT_COLUMNS.count(",") + 1)) + ")"
    return f"INSERT INTO trajectories ({_PUT_COLUMNS}) VALUES {', '.join([marks] * rows)}"


Versions = tuple[int, int] | tuple[None, None]


def versions_of(trajectory: Trajectory) -> Versions:
    """Oldest and newest version among the sampled tokens; None without any."""
    sampled = trajectory.versions[trajectory.action_mask.view(bool)]
    return (int(sampled.min()), int(sampled.max())) if len(sampled) else (None, None)


def open_store(path: Path, run_id: str) -> Store:
    """Open or create the run's store. Raises StoreError if it belongs to another run or version."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    connection.executescript(SCHEMA)
    store = Store(connection)
    for key, value in (("schema", str(SCHEMA_VERSION)), ("run_id", run_id)):
        found = store.meta(key)
        if found is None:
            store.set_meta(key, value)
        elif found != value:
            connection.close()
            raise StoreError(
                f"{path} has {key} {found!r}, this run has {value!r}: resume the run that made it, "
                "or give this run a folder of its own"
            )
    return store


class Store:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection.execute
        self._connection = connection
        self.evaluations = EvaluationRows(connection.execute)
        self._puts: list[tuple[Any, ...]] = []  # rows of trajectories that are not written yet

    def begin(self) -> None:
        self._sql("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._write_puts()
        self._sql("COMMIT")

    def close(self) -> None:
        """Whatever was not committed is gone, as after a crash."""
        self._connection.close()

    # --- meta -------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        row = self._sql("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def set_meta(self, key: str, value: str) -> None:
        self._sql("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # --- groups and leases ------------------------------------------------------------------------

    def add_group(self, group: Group, version: int) -> None:
        self._sql(
            "INSERT INTO groups (number, group_id, epoch, prompt_index, size, spare, seed, leased_version,"
            " leased_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                group.number,
                group.group_id,
                group.epoch,
                group.prompt_index,
                group.size,
                group.spare,
                group.seed,
                version,
                time.time(),
            ),
        )

    def add_lease(self, held: Held) -> None:
        members = json.dumps(held.members)
        self._sql(
            "INSERT INTO leases (lease_id, group_id, actor, members, granted_at) VALUES (?, ?, ?, ?, ?)",
            (held.lease_id, held.group_id, held.actor, members, time.time()),
        )

    def end_lease(self, lease_id: str, ended_by: str) -> None:
        self._sql(
            "UPDATE leases SET ended_at = ?, ended_by = ? WHERE lease_id = ?",
            (time.time(), ended_by, lease_id),
        )

    def note_expiry(self, group_id: str) -> None:
        self._sql("UPDATE groups SET expiries = expiries + 1 WHERE group_id = ?", (group_id,))

    def close_group(self, group: Group, outcome: str) -> None:
        self._sql(
            "UPDATE groups SET outcome = ?, closed_at = ?, version_min = ?, version_max = ? WHERE number = ?",
            (outcome, time.time(), group.version_min, group.version_max, group.number),
        )

    def drop_ready(self, group_id: str, reason: DropReason) -> None:
        """A complete group will not be trained after all."""
        self._sql("UPDATE groups SET outcome = ? WHERE group_id = ?", (reason, group_id))

    def has_group(self, group_id: str) -> bool:
        return self._sql("SELECT 1 FROM groups WHERE group_id = ?", (group_id,)).fetchone() is not None

    def visited(self, epoch: int) -> set[int]:
        """Prompts that the epoch has come to: leased, or left out by the curriculum."""
        query = (
            "SELECT prompt_index FROM groups WHERE epoch = ?1"
            " UNION SELECT prompt_index FROM skips WHERE epoch = ?1"
        )
        return {prompt for (prompt,) in self._sql(query, (epoch,))}

    def add_skips(self, epoch: int, prompts: Sequence[int]) -> None:
        query = "INSERT INTO skips (epoch, prompt_index) VALUES (?, ?)"
        self._connection.executemany(query, [(epoch, prompt) for prompt in prompts])

    def num_skipped(self) -> int:
        return self._sql("SELECT count(*) FROM skips").fetchone()[0]

    def closed_groups(self) -> list[tuple[int, int, bool]]:
        """(epoch, prompt, whether its rewards differ) of closed groups with two or more scored members, in
        the order in which they closed."""
        rows = self._sql(
            "SELECT epoch, prompt_index, min(reward) < max(reward)"
            " FROM groups JOIN trajectories USING (group_id)"
            " WHERE outcome NOTNULL GROUP BY groups.number HAVING count(reward) > 1"
            " ORDER BY closed_at, groups.number"
        )
        return [(epoch, prompt, bool(differs)) for epoch, prompt, differs in rows]

    def last_group(self) -> tuple[int, int]:
        """(number, epoch) of the group leased last; (0, 0) before the first."""
        query = "SELECT number, epoch FROM groups ORDER BY number DESC LIMIT 1"
        return self._sql(query).fetchone() or (0, 0)

    # --- trajectories -----------------------------------------------------------------------------

    def put(self, trajectory: Trajectory, versions: Versions, payload: bytes) -> None:
        """Written with the other puts of the transaction, at its end or before someone reads them."""
        self._puts.append(
            (
                trajectory.group_id,
                trajectory.index,
                trajectory.lease_id,
                trajectory.actor,
                trajectory.task,
                trajectory.stop_reason,
                trajectory.reward,
                trajectory.error,
                trajectory.prompt_len,
                int(trajectory.action_mask.sum()),
                len(trajectory.token_ids),
                len(trajectory.turns),
                *versions,
                time.time(),
                payload,
            )
        )

    def _write_puts(self) -> None:
        """Many rows in one statement: the interpreter's lock is free while SQLite works on them."""
        for start in range(0, len(self._puts), ROWS_PER_INSERT):
            rows = self._puts[start : start + ROWS_PER_INSERT]
            self._sql(_insert_puts(len(rows)), [value for row in rows for value in row])
        self._puts.clear()

    def has_member(self, group_id: str, member: int) -> bool:
        self._write_puts()
        query = "SELECT 1 FROM trajectories WHERE group_id = ? AND member = ?"
        return self._sql(query, (group_id, member)).fetchone() is not None

    def note_late_put(self, group_id: str) -> None:
        self._sql("UPDATE groups SET late_puts = late_puts + 1 WHERE group_id = ?", (group_id,))

    # --- batches ----------------------------------------------------------------------------------

    def bind(self, batch: BatchRow, group_ids: Sequence[str]) -> None:
        """Tie the groups to the step for good."""
        self._sql(
            "INSERT INTO batches (step, version, mask_below, bound_at) VALUES (?, ?, ?, ?)",
            (batch.step, batch.version, batch.mask_below, time.time()),
        )
        for group_id in group_ids:
            self._sql("UPDATE groups SET step = ? WHERE group_id = ?", (batch.step, group_id))

    def batch(self, step: int) -> BatchRow | None:
        query = "SELECT step, version, mask_below FROM batches WHERE step = ?"
        row = self._sql(query, (step,)).fetchone()
        return BatchRow(*row) if row else None

    def batch_payloads(self, step: int) -> list[list[Payload]]:
        """Of each group of the batch, oldest group first, the scored members in index order."""
        self._write_puts()
        rows = self._sql(
            "SELECT g.number, t.version_min, t.payload FROM groups g JOIN trajectories t USING (group_id)"
            " WHERE g.step = ? AND t.reward IS NOT NULL ORDER BY g.number, t.member",
            (step,),
        )
        groups: dict[int, list[Payload]] = {}
        for number, version_min, payload in rows:
            groups.setdefault(number, []).append(Payload(version_min, payload))
        return list(groups.values())

    def commit_batch(self, step: int, version: int, published: bool) -> None:
        self._sql(
            "UPDATE batches SET committed_at = ?, committed_version = ?, published = ? WHERE step = ?",
            (time.time(), version, published, step),
        )

    def uncommit_after(self, step: int) -> None:
        """The learner resumed at `step`: the batches after it are to be trained again."""
        self._sql(
            "UPDATE batches SET committed_at = NULL, committed_version = NULL, published = 0 WHERE step > ?",
            (step,),
        )

    def steps(self) -> tuple[int, int]:
        """(last step committed, last step bound), 0 for none."""
        return self._sql(
            "SELECT coalesce(max(step) FILTER (WHERE committed_at NOTNULL), 0), coalesce(max(step), 0)"
            " FROM batches"
        ).fetchone()

    def bound_groups(self) -> dict[int, tuple[str, ...]]:
        """Group ids of each uncommitted batch, by step."""
        rows = self._sql(
            "SELECT step, group_id FROM groups JOIN batches USING (step)"
            " WHERE committed_at IS NULL ORDER BY number"
        )
        found: dict[int, tuple[str, ...]] = {}
        for step, group_id in rows:
            found[step] = (*found.get(step, ()), group_id)
        return found

    def trained_since_publish(self) -> int:
        """Groups of committed steps after the last one that brought a new version."""
        query = (
            "SELECT count(*) FROM groups JOIN batches USING (step) WHERE committed_at NOTNULL"
            " AND step > (SELECT coalesce(max(step), 0) FROM batches WHERE published)"
        )
        return self._sql(query).fetchone()[0]

    def prune(self, step: int) -> None:
        """Delete the payloads of batches up to `step` and of dropped groups. The facts stay."""
        self._write_puts()
        pruned = (
            "SELECT group_id FROM groups WHERE outcome IS NOT NULL AND pruned = 0"
            f" AND (outcome <> '{COMPLETE}' OR step <= ?)"
        )
        self._sql(f"UPDATE trajectories SET payload = NULL WHERE group_id IN ({pruned})", (step,))
        self._sql(f"UPDATE groups SET pruned = 1 WHERE group_id IN ({pruned})", (step,))

    # --- what the index is built from -------------------------------------------------------------

    def running_groups(self) -> list[Group]:
        """Groups without an outcome, with the members they have."""
        rows = self._sql(
            "SELECT number, group_id, epoch, prompt_index, size, spare, seed, expiries,"
            " (SELECT count(*) FROM leases l WHERE l.group_id = g.group_id)"
            " FROM groups g WHERE outcome IS NULL ORDER BY number"
        )
        groups = {
            row[1]: Group(*row[:7], expiries=row[7], leases=row[8])  # the columns are in Group's order
            for row in rows
        }
        members = self._sql(
            "SELECT group_id, member, reward, t.version_min, t.version_max"
            " FROM groups g JOIN trajectories t USING (group_id) WHERE g.outcome IS NULL"
        )
        for group_id, member, reward, version_min, version_max in members:
            groups[group_id].add(member, reward, version_min, version_max)
        return list(groups.values())

    def open_leases(self) -> list[OpenLease]:
        rows = self._sql("SELECT lease_id, group_id, actor FROM leases WHERE ended_at IS NULL")
        return [OpenLease(*row) for row in rows]

    def ready_groups(self) -> list[ReadyGroup]:
        rows = self._sql(
            "SELECT number, group_id, version_min, version_max FROM groups"
            f" WHERE outcome = '{COMPLETE}' AND step IS NULL ORDER BY number"
        )
        return [ReadyGroup(*row) for row in rows]

    # --- the ledger, from the rows ----------------------------------------------------------------

    def counts(self) -> Counter[str]:
        """Groups by place, see the view `ledger`; and `leased`."""
        counts = Counter(dict(self._sql("SELECT place, count(*) FROM ledger GROUP BY place").fetchall()))
        counts["leased"] = self.last_group()[0]
        return counts

    def places(self) -> Places:
        rows = self._sql(
            "SELECT place, group_id FROM ledger WHERE place IN ('running', 'ready', 'bound')"
        ).fetchall()
        running, ready, bound = (
            frozenset(group_id for place, group_id in rows if place == wanted)
            for wanted in ("running", "ready", "bound")
        )
        return Places(running, ready, bound)
