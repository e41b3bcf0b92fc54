"""The store as its readers see it: the queries of docs/buffer.md, the payloads, and durability settings."""

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from buffer.codec import decode_trajectory
from buffer.messages import CommitStep, PutTrajectory
from buffer.store import open_store
from tests.unit.buffer.support import Buffer, config, member

DOC = Path(__file__).parents[3] / "docs" / "buffer.md"
QUERIES = re.findall(r"```sql\n(.*?)```", DOC.read_text(), re.DOTALL)


@pytest.fixture
def filled(tmp_path):
    """Two trained steps, a failed member, a zero-variance group, and one that still runs."""
    buffer = Buffer(tmp_path / "buffer.sqlite", config(batch=1, group_size=3, staleness=1))
    for step in (1, 2):
        (lease,) = buffer.lease(most=1)
        for index in lease.missing:
            buffer(
                PutTrajectory(
                    member(lease, index, reward=None if index == 2 else float(index), version=step - 1)
                )
            )
        assert buffer.batch(step) is not None
        buffer(CommitStep(step, step))
    (lease,) = buffer.lease(most=1)
    buffer.complete(lease, reward=1.0)
    buffer.lease(most=1)
    yield sqlite3.connect(f"file:{buffer.path}?mode=ro", uri=True)
    buffer.close()


def test_the_document_has_six_queries():
    assert len(QUERIES) == 6


def test_the_ledger_query(filled):
    assert dict(filled.execute(QUERIES[0]).fetchall()) == {
        "trained": 2,
        "dropped_zero_variance": 1,
        "running": 1,
    }


def test_the_reward_query(filled):
    assert filled.execute(QUERIES[1]).fetchall() == [(1, 0.5, 2, 4.0), (2, 0.5, 2, 4.0)]


def test_the_failures_query(filled):
    assert filled.execute(QUERIES[2]).fetchall() == [
        ("answer", None, 7),
        ("error", "the tool server is gone", 2),
    ]


def test_the_staleness_query(filled):
    assert filled.execute(QUERIES[3]).fetchall() == [(1, 0, 0.0), (2, 0, 0.0)]


def test_the_prompts_query(filled):
    hardest = filled.execute(QUERIES[4]).fetchall()[0]
    assert hardest[1:] == (1, 1.0, 1.0)


def test_the_held_out_query(tmp_path):
    buffer = Buffer(tmp_path / "buffer.sqlite", config(batch=1, evaluate_every=1), num_held_out=2)
    buffer.complete(buffer.lease(most=1)[0])
    buffer.train(1)
    for lease, success in zip(buffer.lease(most=2), (1.0, 0.0), strict=True):
        made = replace(member(lease, 0, version=1), metrics={"success": success})
        buffer(PutTrajectory(made))
    reader = sqlite3.connect(f"file:{buffer.path}?mode=ro", uri=True)
    assert reader.execute(QUERIES[5]).fetchall() == [(1, 0.5, 2, 1)]
    buffer.close()


def test_a_reader_decodes_a_payload(filled):
    trajectory_id, payload = filled.execute(
        "SELECT trajectory_id, payload FROM trajectories LIMIT 1"
    ).fetchone()
    assert decode_trajectory(payload).trajectory_id == trajectory_id


def test_commits_reach_the_disk_before_they_return(tmp_path):
    store = open_store(tmp_path / "b.sqlite", "run")
    pragmas = {
        name: store._connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("synchronous", "journal_mode")
    }
    store.close()
    assert pragmas == {"synchronous": 2, "journal_mode": "wal"}  # 2 = FULL


def test_what_was_not_committed_is_gone(tmp_path):
    store = open_store(tmp_path / "b.sqlite", "run")
    store.begin()
    store.set_meta("version", "7")
    store.close()
    store = open_store(tmp_path / "b.sqlite", "run")
    assert store.meta("version") is None
    store.close()
