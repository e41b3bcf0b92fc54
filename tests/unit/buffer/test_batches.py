"""Batches, commits, resumes, staleness at hand-out, pruning and the ledger, on a real store."""

import numpy as np
import pytest

from buffer.messages import (
    AnnouncePublisher,
    BatchReply,
    Checkpointed,
    CommitStep,
    GetBatch,
    Heartbeat,
    Hello,
    Ok,
    PutAck,
    PutTrajectory,
    Refused,
    Resume,
    Status,
)
from buffer.roles import MAX_REPORTS
from buffer.store import StoreError, open_store
from metrics import names
from tests.unit.buffer.support import Buffer, config, member, members


@pytest.fixture
def open_buffer(tmp_path):
    opened = []

    def open_one(**settings):
        opened.append(Buffer(tmp_path / "buffer.sqlite", config(**settings)))
        return opened[-1]

    yield open_one
    for buffer in opened:
        buffer.close()


def ids(batch):
    return [one.trajectory_id for group in members(batch) for one in group]


def fill(buffer, groups=100):
    for lease in buffer.lease(most=groups):
        buffer.complete(lease)


def run_steps(buffer, last, first=1):
    """Train steps; the batches' ids by step."""
    trained = {}
    for step in range(first, last + 1):
        fill(buffer)
        trained[step] = ids(buffer.batch(step))
        assert buffer(CommitStep(step, step)) == Ok()
    return trained


# --- hand-out ---------------------------------------------------------------------------------------


def test_a_batch_holds_the_oldest_groups_in_index_order_whoever_finished_first(open_buffer):
    buffer = open_buffer(batch=2, staleness=1)
    leases = buffer.lease()
    for lease in leases[::-1]:
        buffer.put(lease, 1)
        buffer.put(lease, 0)
    assert ids(buffer.batch(1)) == [f"{lease.group_id}/{index}" for lease in leases[:2] for index in (0, 1)]


def test_a_batch_fetched_ahead_has_the_version_under_which_it_is_trained(open_buffer):
    buffer = open_buffer(batch=1, staleness=1)
    fill(buffer)
    assert buffer.batch(1).version == 0
    assert buffer.batch(2).version == 1, "asked for while step 1 trains: its tokens are one version old"
    buffer(CommitStep(1, 1))
    assert buffer.batch(2).version == 1


def test_a_slow_group_does_not_hold_up_the_others(open_buffer):
    buffer = open_buffer(batch=2, staleness=1)
    _slow, *rest = buffer.lease()
    for lease in rest:
        buffer.complete(lease)
    assert ids(buffer.batch(1))[0] == f"{rest[0].group_id}/0"
    assert buffer.places() == {"leased": 4, "bound": 2, "ready": 1, "running": 1}


def test_failed_members_are_not_handed_out(open_buffer):
    buffer = open_buffer(group_size=3, batch=1)
    (lease,) = buffer.lease(most=1)
    buffer.put(lease, 0)
    buffer.put(lease, 2)
    assert buffer.batch(1) is None
    buffer(PutTrajectory(member(lease, 1, reward=None)))
    assert ids(buffer.batch(1)) == [f"{lease.group_id}/0", f"{lease.group_id}/2"]


def test_the_same_step_is_the_same_batch_also_after_a_crash(open_buffer):
    buffer = open_buffer()
    fill(buffer)
    first = ids(buffer.batch(1))
    assert ids(buffer.batch(1)) == first
    buffer.crash()
    assert ids(buffer.batch(1)) == first
    buffer.train(1)
    assert ids(buffer.batch(1)) == first  # a slower rank may still ask


def test_a_batch_that_is_not_ready_says_how_many_groups_wait(open_buffer):
    buffer = open_buffer(batch=2)
    buffer.complete(buffer.lease(most=1)[0])
    assert buffer(GetBatch(1, 0.0)) == BatchReply(None, 1, "1 of 2 groups are ready")


def test_a_batch_that_is_not_ready_names_the_actors_that_hold_still(open_buffer):
    buffer = open_buffer(batch=2)
    buffer.beat("actor-1", state="paused: search is down: connection refused")
    buffer.beat("actor-0")
    waits_for = buffer(GetBatch(1, 0.0)).waits_for
    assert waits_for == "0 of 2 groups are ready; actor-1 is paused: search is down: connection refused"
    buffer.pass_time(10 * buffer.config.buffer.heartbeat_s)
    assert "actor-1" not in buffer(GetBatch(1, 0.0)).waits_for


@pytest.mark.parametrize("step, sentence", [(0, "no step 0"), (101, "no step 101"), (3, "sends Resume")])
def test_a_step_out_of_turn_is_refused(open_buffer, step, sentence):
    reply = open_buffer()(GetBatch(step, 0.0))
    assert isinstance(reply, Refused) and sentence in reply.reason


# --- staleness --------------------------------------------------------------------------------------


def age(buffer, steps):
    """Train `steps` steps while whatever is leased stays unfinished."""
    for step in range(1, steps + 1):
        fill(buffer)
        buffer.train(step)


def test_a_group_with_a_token_that_is_too_old_is_dropped_as_stale(open_buffer):
    buffer = open_buffer(batch=1, staleness=1)
    (slow,) = buffer.lease("slow", most=1)
    age(buffer, 2)
    buffer.put(slow, 0, version=2)
    buffer.put(slow, 1, version=0)
    assert buffer.batch(3) is None
    assert buffer.places()["dropped_stale"] == 1 and buffer.status().balanced


def test_masking_keeps_the_group_without_its_expired_tokens(open_buffer):
    buffer = open_buffer(batch=1, staleness=1, on_stale="mask")
    (slow,) = buffer.lease("slow", most=1)
    age(buffer, 2)
    buffer.put(slow, 0, version=2)
    buffer.put(slow, 1, version=0)
    ((young, old),) = members(buffer.batch(3))
    assert young.action_mask.sum() == 4 and old.action_mask.sum() == 0
    assert old.versions.max() == 0 and old.action_mask.dtype == np.uint8  # the facts stay
    buffer.crash(config(batch=1, staleness=0, on_stale="mask"))
    assert ids(buffer.batch(3)) == [young.trajectory_id, old.trajectory_id]
    ((young_again, old_again),) = members(buffer.batch(3))
    assert young_again.action_mask.sum() == 4 and old_again.action_mask.sum() == 0


def test_masking_still_drops_a_group_of_which_nothing_is_left(open_buffer):
    buffer = open_buffer(batch=1, staleness=1, on_stale="mask")
    (slow,) = buffer.lease("slow", most=1)
    age(buffer, 2)
    buffer.complete(slow, version=0)
    assert buffer.batch(3) is None
    assert buffer.places()["dropped_stale"] == 1


def test_a_prefetched_batch_is_judged_by_the_version_that_will_train_it(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    fill(buffer)
    assert buffer.batch(1) is not None
    buffer.crash(config(batch=1, staleness=1))
    fill(buffer)  # leased at version 0
    buffer.crash(config(batch=1, staleness=0))
    assert buffer.batch(2) is None  # step 2 will be trained at version 1
    assert buffer.places() == {"leased": 2, "bound": 1, "dropped_stale": 1}


def test_an_abandoned_group_that_is_too_old_is_not_leased_again(open_buffer):
    buffer = open_buffer(batch=1, staleness=1)
    (slow,) = buffer.lease("slow", most=1)
    buffer.put(slow, 0, actor="slow")
    age(buffer, 2)
    buffer.pass_time(130)
    assert all(lease.group_id != slow.group_id for lease in buffer.lease())
    assert buffer.places()["dropped_stale"] == 1


# --- commit, resume, exactly once -------------------------------------------------------------------


def test_committing_again_changes_nothing(open_buffer):
    buffer = open_buffer()
    run_steps(buffer, 2)
    before = buffer.status()
    assert buffer(CommitStep(1, 1)) == Ok()
    assert buffer.status().ledger == before.ledger and buffer.status().version == 2


@pytest.mark.parametrize("message", [CommitStep(2, 2), CommitStep(1, 1), Resume(5, 5), Resume(0, -1)])
def test_what_contradicts_the_store_is_refused(open_buffer, message):
    reply = open_buffer()(message)
    assert isinstance(reply, Refused) and reply.reason


def test_a_resume_serves_exactly_the_batches_after_the_checkpoint(open_buffer):
    buffer = open_buffer()
    trained = run_steps(buffer, 5)
    fill(buffer)
    trained[6] = ids(buffer.batch(6))  # bound, not committed
    buffer(Resume(2, 2))
    assert buffer.status().version == 2 and buffer.status().step == 2
    assert buffer.places()["trained"] == 4 and buffer.places()["bound"] == 8 and buffer.status().balanced
    for step in range(3, 7):
        assert ids(buffer.batch(step)) == trained[step]
        buffer(CommitStep(step, step))
    everything = [one for step in trained for one in trained[step]]
    assert len(everything) == len(set(everything))


def test_m2_a_death_between_checkpoint_and_commit_trains_nothing_twice(open_buffer):
    buffer = open_buffer()
    run_steps(buffer, 1)
    fill(buffer)
    second = ids(buffer.batch(2))
    buffer.crash()
    buffer(Resume(2, 2))  # the checkpoint of step 2 was written, its commit never sent
    assert buffer.status().step == 2 and buffer.status().version == 2
    fill(buffer)
    assert not set(second) & set(ids(buffer.batch(3)))
    assert buffer.status().balanced


def test_m9_a_resume_works_with_another_batch_size_and_limit(open_buffer):
    buffer = open_buffer(batch=2, staleness=3)
    run_steps(buffer, 2)
    fill(buffer)
    bound = ids(buffer.batch(3))
    buffer.crash(config(batch=3, staleness=1))
    buffer(Resume(2, 2))
    assert ids(buffer.batch(3)) == bound
    assert buffer.grant().leases == ()  # 2 bound and 6 ready exceed the new window of 6
    buffer.train(3)
    assert buffer.batch(4) is None and buffer.places()["dropped_stale"] == 4  # older than the new limit
    fill(buffer)
    assert len(buffer.batch(4).groups) == 3
    assert buffer.status().balanced and not buffer.broker.audit()


def test_fewer_published_versions_than_steps_keep_the_bound(open_buffer):
    buffer = open_buffer(batch=1, staleness=1, every=2)
    for step in range(1, 9):
        fill(buffer)
        batch = members(buffer.batch(step))
        version = buffer.status().version
        assert version - min(int(one.versions[3]) for group in batch for one in group) <= 1
        buffer(CommitStep(step, step // 2))
    assert buffer.places() == {"leased": buffer.status().ledger["leased"], "trained": 8, "ready": 2}


# --- the end ----------------------------------------------------------------------------------------


def test_after_the_last_step_what_is_left_is_dropped_as_shutdown(open_buffer):
    buffer = open_buffer(steps=1, batch=1, group_size=2, staleness=2)
    first = buffer.lease(most=1)[0]
    buffer.complete(first)
    buffer.train(1)
    status = buffer.status()
    assert status.finished and status.balanced
    assert buffer.grant().reason == "finished"
    assert buffer(Heartbeat("actor", "actor-0")).finished


def test_at_the_end_no_more_is_leased_than_the_last_steps_need(open_buffer):
    buffer = open_buffer(steps=1, batch=2, staleness=4)
    assert len(buffer.lease()) == 2


def test_an_unfinished_group_is_dropped_at_the_end_and_its_actor_hears_it(open_buffer):
    buffer = open_buffer(steps=2, batch=1, staleness=1)
    slow, quick = buffer.lease()
    buffer.complete(quick)
    buffer.train(1)
    buffer.crash(config(steps=1, batch=1))
    assert buffer.beat("actor-0", slow).lost == (slow.lease_id,)
    assert buffer.status().finished
    assert buffer.places() == {"leased": 2, "trained": 1, "dropped_shutdown": 1}


# --- pruning and audit ------------------------------------------------------------------------------


def payloads(buffer):
    query = "SELECT count(payload), count(*) FROM trajectories"
    return buffer.store._connection.execute(query).fetchone()


def test_a_checkpoint_prunes_what_will_never_be_asked_for(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    buffer.complete(buffer.lease()[0], reward=1.0)  # dropped: zero variance
    run_steps(buffer, 4)
    buffer(Checkpointed(step=4, oldest_step=2))
    assert payloads(buffer) == (4, 10)  # steps 3 and 4; the rows stay
    buffer(Resume(2, 2))
    assert buffer.batch(3) is not None
    buffer.crash()
    for message in (GetBatch(2, 0.0), Resume(1, 1)):
        reply = buffer(message)
        assert isinstance(reply, Refused) and "pruned" in reply.reason


def test_keep_all_keeps_all(open_buffer):
    buffer = open_buffer(batch=1, keep="all")
    run_steps(buffer, 3)
    buffer(Checkpointed(step=3, oldest_step=3))
    buffer(Resume(0, 0))
    assert buffer.batch(1) is not None


def test_an_imbalance_is_named_with_its_ids_and_shows_in_the_status(open_buffer):
    buffer = open_buffer()
    lease, *_ = buffer.lease()
    buffer.store._connection.execute("DELETE FROM groups WHERE group_id = ?", (lease.group_id,))
    buffer(Checkpointed(0, 0))
    assert not buffer.status().balanced
    assert any(lease.group_id in sentence for sentence in buffer.broker.audit())


def test_a_group_lost_from_the_index_shows_at_once(open_buffer):
    buffer = open_buffer()
    lease, *_ = buffer.lease()
    del buffer.broker._running.groups[lease.group_id]
    assert not buffer.status().balanced


# --- roles, reports, store --------------------------------------------------------------------------


def test_a_status_shows_the_roles_and_the_reports_since(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    buffer(Heartbeat("actor", "actor-0", (lease.lease_id,), 3, "running", {"actor/tokens_sampled": 5.0}))
    buffer.now += 1.5
    status = buffer.status()
    (role,) = status.roles
    assert (role.name, role.version, role.leases, role.seconds_since_heard) == ("actor-0", 3, 1, 1.5)
    ((number, role_kind, name, _, metrics),) = status.reports
    assert (role_kind, name, metrics) == ("actor", "actor-0", {"actor/tokens_sampled": 5.0})
    assert buffer(Status(number)).reports == ()


def test_report_numbers_grow_across_restarts(open_buffer):
    buffer = open_buffer()
    buffer(Heartbeat("actor", "a", metrics={"x": 1.0}))
    seen = buffer.status().reports[-1][0]
    buffer.now += 1.0
    buffer.crash()
    buffer(Heartbeat("actor", "a", metrics={"x": 2.0}))
    assert [report[4] for report in buffer(Status(seen)).reports] == [{"x": 2.0}]


def test_reports_are_bounded(open_buffer):
    buffer = open_buffer()
    for _ in range(MAX_REPORTS + 5):
        buffer.broker.handle(Heartbeat("actor", "a", metrics={"x": 1.0}), buffer.now)
    assert len(buffer.status().reports) == MAX_REPORTS


def test_the_buffer_reports_its_gauges_and_the_ledger(open_buffer):
    buffer = open_buffer()
    buffer.lease(most=3)
    buffer.broker.report({names.BUFFER_PUT_MS: 0.5})
    (_, role, _, _, metrics) = buffer.status().reports[-1]
    assert role == "buffer" and metrics[names.BUFFER_RUNNING] == 3
    assert metrics["buffer/ledger_leased"] == 3 and metrics[names.BUFFER_PUT_MS] == 0.5


def test_the_publisher_is_remembered(open_buffer):
    buffer = open_buffer()
    buffer(AnnouncePublisher("tcp://127.0.0.1:9"))
    buffer.crash()
    assert buffer(Hello("actor", "a")).publisher == "tcp://127.0.0.1:9"
    assert buffer(Heartbeat("actor", "a")).publisher == "tcp://127.0.0.1:9"


def test_another_protocol_is_refused_at_hello(open_buffer):
    assert isinstance(open_buffer()(Hello("actor", "a", protocol=9)), Refused)


def test_a_store_of_another_run_is_refused(tmp_path):
    open_store(tmp_path / "b.sqlite", "run-1").close()
    with pytest.raises(StoreError, match="run_id 'run-1'"):
        open_store(tmp_path / "b.sqlite", "run-2")


def test_memory_holds_no_group_that_is_trained(open_buffer):
    buffer = open_buffer(batch=1, staleness=0, steps=1000)
    run_steps(buffer, 50)
    assert buffer.put(buffer.lease(most=1)[0], 0) == PutAck(True, False)
    index = buffer.broker
    assert len(index._running.groups) == 1 and not index._batches.ready and not index._batches.bound
