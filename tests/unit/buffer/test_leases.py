"""Leases and groups through the broker, on a real store with a clock of its own."""

import pytest

from buffer.groups import Group, PromptOrder, verdict
from buffer.leases import MAX_EXPIRIES
from buffer.messages import (
    Drain,
    DropReason,
    Gone,
    Hello,
    LeaseRequest,
    PutAck,
    PutTrajectory,
    Refused,
    ReturnLeases,
)
from buffer.store import StoreError
from tests.unit.buffer.support import Buffer, config, member, members, trajectory


@pytest.fixture
def open_buffer(tmp_path):
    opened = []

    def open_one(num_prompts=1000, **settings):
        opened.append(Buffer(tmp_path / "buffer.sqlite", config(**settings), num_prompts))
        return opened[-1]

    yield open_one
    for buffer in opened:
        buffer.close()


# --- order ------------------------------------------------------------------------------------------


def test_an_epoch_visits_each_prompt_once_in_an_order_set_by_the_seed():
    def order(seed):
        prompts = PromptOrder(5, seed, 0, lambda epoch: set())
        return [prompts.next() for _ in range(10)]

    assert [epoch for epoch, _ in order(0)] == [0] * 5 + [1] * 5
    assert (
        sorted(prompt for _, prompt in order(0)[:5])
        == sorted(prompt for _, prompt in order(0)[5:])
        == list(range(5))
    )
    assert order(0) == order(0) != order(1)


def test_an_epoch_visits_each_prompt_once_across_crashes(open_buffer):
    buffer = open_buffer(num_prompts=7, batch=8)
    seen = []
    for _ in range(7):
        (lease,) = buffer.lease(most=1)
        seen.append((lease.epoch, lease.prompt_index))
        buffer.crash()
    assert sorted(seen) == [(0, prompt) for prompt in range(7)]
    assert buffer.lease(most=1)[0].epoch == 1


def test_a_run_resumed_with_fewer_rows_than_it_leased_says_so(open_buffer):
    buffer = open_buffer(num_prompts=50)
    buffer.lease()
    buffer.num_prompts = 1
    with pytest.raises(StoreError, match="the task now has 1 rows"):
        buffer.crash()


def test_a_task_without_prompts_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        PromptOrder(0, 0, 0, lambda epoch: set())


# --- granting ---------------------------------------------------------------------------------------


def test_m8_leases_stop_at_the_capacity_and_nothing_is_dropped(open_buffer):
    buffer = open_buffer(batch=2, staleness=1)
    grant = buffer.grant(most=100)
    assert (len(grant.leases), grant.reason) == (4, "capacity")
    assert grant.retry_after_s > 0
    for lease in grant.leases:
        buffer.complete(lease)
    assert buffer.grant().leases == ()
    assert buffer.places() == {"leased": 4, "ready": 4}
    buffer.train(1)
    assert len(buffer.lease()) == 2


def test_a_grant_says_what_an_actor_needs(open_buffer):
    lease = open_buffer(group_size=3).lease(most=1)[0]
    assert lease.group_size == 3 and lease.missing == (0, 1, 2) and lease.version == 0
    assert lease.deadline_s == 120 and 0 <= lease.seed < 2**48


def test_weights_that_are_too_old_get_no_lease(open_buffer):
    buffer = open_buffer(staleness=1)
    for step in (1, 2):
        for lease in buffer.lease(most=2):
            buffer.complete(lease)
        buffer.train(step)
    assert buffer.grant(version=0).reason == "weights_too_old"
    assert buffer.grant(version=1).leases


def test_an_engine_that_waits_for_weights_gets_no_lease_that_would_come_out_stale(open_buffer):
    """The learner has published 1, the engine still serves 0: what it samples now is of version 0, and the
    place that version 1 made would be handed out at version 2."""
    buffer = open_buffer(staleness=1, batch=4)
    for lease in buffer.lease(most=8):
        buffer.complete(lease)
    buffer.train(1)
    assert buffer.grant(version=0).reason == "capacity"
    assert len(buffer.grant(version=1, most=8).leases) == 4


def test_on_policy_makes_progress(open_buffer):
    buffer = open_buffer(staleness=0, batch=2)
    for step in range(1, 6):
        leases = buffer.lease()
        assert len(leases) == 2
        for lease in leases:
            buffer.complete(lease)
        batch = buffer.batch(step)
        assert {int(one.versions.max()) for group in members(batch) for one in group} == {step - 1}
        assert buffer.grant().reason == "capacity"  # the batch in training takes the place
        buffer.train(step)


def test_actors_share_the_window(open_buffer):
    buffer = open_buffer(batch=4, staleness=0)
    buffer.beat("actor-0")
    buffer.beat("actor-1")
    assert len(buffer.lease("actor-0")) == len(buffer.lease("actor-1")) == 2


def test_the_window_is_one_actors_when_the_others_are_gone(open_buffer):
    buffer = open_buffer(batch=4, staleness=0)
    buffer.beat("actor-0")
    buffer.beat("actor-1")
    buffer.pass_time(60)
    assert len(buffer.lease("actor-0")) == 4


# --- ending -----------------------------------------------------------------------------------------


def test_what_is_missing_of_an_expired_lease_goes_to_another_actor(open_buffer):
    buffer = open_buffer(group_size=3)
    (lease,) = buffer.lease("dead", most=1)
    buffer.put(lease, 1, actor="dead")
    buffer.pass_time(120)
    (again,) = buffer.lease("actor-1", most=1)
    assert (again.group_id, again.missing, again.seed) == (lease.group_id, (0, 2), lease.seed)
    assert again.lease_id != lease.lease_id


def test_heartbeats_keep_a_lease(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    for _ in range(5):
        buffer.pass_time(60)
        assert buffer.beat("actor-0", lease).lost == ()
    assert buffer.grant("actor-1").leases == ()


def test_a_put_is_a_sign_of_life(open_buffer):
    buffer = open_buffer(group_size=3)
    (lease,) = buffer.lease(most=1)
    buffer.pass_time(100)
    buffer.put(lease, 0)
    buffer.pass_time(100)
    assert buffer.beat("actor-0", lease).lost == ()


def test_a_hung_member_loses_its_lease_however_often_it_is_renewed(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    lost = ()
    for _ in range(20):
        buffer.pass_time(60)
        lost += buffer.beat("actor-0", lease).lost
    assert lease.lease_id in lost


def test_an_actor_reborn_under_its_name_does_not_hold_old_leases(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease("actor-0")
    buffer.beat("actor-0", lease)
    buffer.pass_time(11)
    buffer.beat("actor-0")  # the new process knows nothing of it
    assert buffer.lease("actor-1")[0].group_id == lease.group_id


def test_the_leases_of_an_actor_that_is_gone_run_out_at_once(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease("dead")
    buffer.beat("dead", lease)
    buffer(Gone(("dead", "never heard of")))
    assert [role.name for role in buffer.status().roles] == []
    (again,) = buffer.lease("actor-1")
    assert again.group_id == lease.group_id and again.lease_id != lease.lease_id


def test_an_actor_that_says_hello_has_none_of_its_predecessors_leases(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease("reborn")
    buffer(Hello("actor", "reborn"))
    (again,) = buffer.lease("actor-1")
    assert again.group_id == lease.group_id


def test_a_prompt_that_kills_its_actors_is_closed_though_each_death_is_told(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    for _ in range(MAX_EXPIRIES):
        buffer.lease("victim", most=1)
        buffer(Gone(("victim",)))
    assert buffer.places() == {"leased": 1, "dropped_expired": 1}


def test_returned_leases_go_to_others_at_once_and_are_no_expiry(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    for _ in range(MAX_EXPIRIES + 2):
        (lease,) = buffer.lease("actor-0")
        buffer(ReturnLeases("actor-0", (lease.lease_id,)))
    assert buffer.places() == {"leased": 1, "running": 1}


def test_nobody_returns_the_leases_of_others(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease("actor-0")
    buffer(ReturnLeases("actor-1", (lease.lease_id,)))
    assert buffer.beat("actor-0", lease).lost == ()


def test_m1_a_late_duplicate_is_acked_and_counted_once_stored(open_buffer):
    buffer = open_buffer()
    (lease,) = buffer.lease("dead", most=1)
    buffer.pass_time(120)
    (again,) = buffer.lease("actor-1", most=1)
    assert buffer.put(lease, 0, actor="dead") == PutAck(stored=True, duplicate=False)
    assert buffer.put(again, 0, actor="actor-1") == PutAck(stored=False, duplicate=True)
    buffer.put(again, 1, actor="actor-1")
    assert buffer.put(lease, 1, actor="dead") == PutAck(
        stored=False, duplicate=True
    )  # the group is ready by now
    assert buffer.store._sql("SELECT sum(late_puts) FROM groups").fetchone() == (2,)
    assert buffer.beat("dead", lease).lost == (lease.lease_id,)


def test_a_group_whose_leases_all_expire_is_dropped_as_expired(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    for attempt in range(MAX_EXPIRIES):
        (lease,) = buffer.lease(f"victim-{attempt}", most=1)
        buffer.pass_time(120)
    assert buffer.places() == {"leased": 1, "dropped_expired": 1}
    assert buffer.put(lease, 0) == PutAck(stored=False, duplicate=False)
    assert buffer.lease()[0].group_id != lease.group_id


def test_expiries_are_counted_across_crashes(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    for attempt in range(MAX_EXPIRIES):
        buffer.lease(f"victim-{attempt}", most=1)
        buffer.crash()
        buffer.pass_time(120)
    assert buffer.places() == {"leased": 1, "dropped_expired": 1}


def test_survivors_are_kept_when_the_rest_expires_for_good(open_buffer):
    buffer = open_buffer(group_size=3)
    for attempt in range(MAX_EXPIRIES):
        (lease,) = buffer.lease(f"victim-{attempt}", most=1)
        if attempt < 2:
            buffer.put(lease, attempt)
        buffer.pass_time(120)
    assert buffer.places() == {"leased": 1, "ready": 1}


def test_leases_of_before_a_crash_are_honoured(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    buffer.put(lease, 0)
    buffer.now += 1000  # the buffer was down for long
    buffer.crash()
    assert buffer.beat("actor-0", lease).lost == ()
    assert buffer.grant("actor-1").leases == ()
    buffer.put(lease, 1)
    assert buffer.places() == {"leased": 1, "ready": 1}


# --- verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, size, expected",
    [
        ([1.0, 0.0], 2, "complete"),
        ([1.0, 0.0, None], 3, "complete"),
        ([1.0, 1.0], 2, DropReason.ZERO_VARIANCE),
        ([1.0, 1.0, None], 3, DropReason.ZERO_VARIANCE),
        ([1.0, None], 2, DropReason.ALL_FAILED),
        ([None, None], 2, DropReason.ALL_FAILED),
        ([1.0], 2, DropReason.EXPIRED),
    ],
)
def test_verdicts(rewards, size, expected):
    group = Group(1, "0-1", 0, 1, size, 0, 0)
    for index, reward in enumerate(rewards):
        group.add(index, reward, 0, 0)
    assert verdict(group, min_survivors=2, drop_zero_variance=True) == expected


def test_equal_rewards_are_kept_if_asked(open_buffer):
    buffer = open_buffer(drop_zero_variance=False)
    buffer.complete(buffer.lease(most=1)[0], reward=1.0)
    assert buffer.places() == {"leased": 1, "ready": 1}


def test_a_zero_variance_group_is_replaced_by_a_fresh_prompt(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    buffer.complete(lease, reward=1.0)
    (fresh,) = buffer.lease()
    assert fresh.prompt_index != lease.prompt_index
    assert buffer.places() == {"leased": 2, "running": 1, "dropped_zero_variance": 1}


def test_min_group_survivors_is_the_configs(open_buffer):
    buffer = open_buffer(group_size=4, min_group_survivors=3)
    (lease,) = buffer.lease(most=1)
    for index in lease.missing:
        buffer(PutTrajectory(member(lease, index, reward=float(index) if index < 2 else None)))
    assert buffer.places() == {"leased": 1, "dropped_all_failed": 1}


# --- spare members ----------------------------------------------------------------------------------


def test_the_first_scored_members_make_the_group_and_later_ones_are_late(open_buffer):
    buffer = open_buffer(group_size=2, spare=2)
    (lease,) = buffer.lease(most=1)
    assert lease.group_size == 4 and lease.missing == (0, 1, 2, 3)
    buffer.put(lease, 3)
    buffer(PutTrajectory(member(lease, 0, reward=None)))  # a failed one is not kept, and does not count
    assert buffer.places()["running"] == 1
    buffer.put(lease, 1)
    assert buffer.places() == {"leased": 1, "ready": 1}
    late = buffer.put(lease, 2)
    assert not late.stored and not late.duplicate
    assert buffer.beat("actor-0", lease).lost == (lease.lease_id,)  # the actor cancels what still runs


def test_m6_a_hung_member_is_not_waited_for_when_a_spare_one_is_scored(open_buffer):
    buffer = open_buffer(group_size=2, spare=1, batch=1)
    (lease,) = buffer.lease(most=1)
    buffer.put(lease, 0)
    buffer.crash()  # what was started is remembered
    buffer.put(lease, 2)
    (group,) = members(buffer.batch(1))
    assert [one.index for one in group] == [0, 2]


def test_when_all_spare_members_are_used_up_the_survivors_count(open_buffer):
    buffer = open_buffer(group_size=3, spare=1)
    (lease,) = buffer.lease(most=1)
    for index in (0, 1):
        buffer(PutTrajectory(member(lease, index, reward=None)))
    for index in (2, 3):
        buffer.put(lease, index)
    assert buffer.places() == {"leased": 1, "ready": 1}


# --- refusals ---------------------------------------------------------------------------------------


def test_a_group_of_another_run_is_refused(open_buffer):
    reply = open_buffer()(PutTrajectory(trajectory("9-9")))
    assert isinstance(reply, Refused) and "never leased by this run" in reply.reason


def test_a_member_that_nobody_asked_for_is_refused(open_buffer):
    buffer = open_buffer(group_size=2)
    (lease,) = buffer.lease(most=1)
    assert isinstance(buffer(PutTrajectory(member(lease, 2))), Refused)
    wrong_prompt = trajectory(lease.group_id, 0, prompt_index=lease.prompt_index + 1)
    assert isinstance(buffer(PutTrajectory(wrong_prompt)), Refused)
    assert buffer.places() == {"leased": 1, "running": 1}


def test_a_reply_is_no_request(open_buffer):
    assert isinstance(open_buffer()(PutAck(True, False)), Refused)


# --- drain ------------------------------------------------------------------------------------------


def test_a_drained_actor_hears_it_and_gets_no_more(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease()
    buffer(Drain(("actor-0",)))
    buffer.crash()
    assert buffer.beat("actor-0", lease).drain
    assert buffer(LeaseRequest("actor-0", 1, 0)).reason == "draining"
    assert not buffer.beat("actor-1").drain


def test_a_new_process_of_a_drained_name_may_lease(open_buffer):
    buffer = open_buffer()
    buffer(Drain(("actor-0",)))
    buffer(Hello("actor", "actor-0"))
    assert buffer.lease("actor-0")


def test_an_actor_that_says_it_is_finished_leaves_its_leases(open_buffer):
    buffer = open_buffer(batch=1, staleness=0)
    (lease,) = buffer.lease("actor-0")
    buffer.beat("actor-0", lease, state="finished")
    assert buffer.lease("actor-1")[0].group_id == lease.group_id
