"""Evaluations during training: held-out prompts on the actors' leases, with an account of their own."""

from dataclasses import replace

import pytest

from buffer.leases import MAX_EXPIRIES
from buffer.messages import Gone, Heartbeat, PutAck, PutTrajectory, Refused, Resume, ReturnLeases
from metrics import names
from tests.unit.buffer.support import Buffer, config, member, members

PROMPTS = 3


@pytest.fixture
def open_buffer(tmp_path):
    opened = []

    def open_one(every=2, held_out=PROMPTS, **settings):
        settings = {"batch": 1, "staleness": 1, "evaluate_every": every, **settings}
        path = tmp_path / "buffer.sqlite"
        opened.append(Buffer(path, config(**settings), num_held_out=held_out))
        return opened[-1]

    yield open_one
    for buffer in opened:
        buffer.close()


def train_to(buffer, step):
    """Train with leases of `train` alone: what is leased for an evaluation is handed back."""
    while buffer.status().step < step:
        for lease in buffer.lease("trainer"):
            if lease.kind == "eval":
                buffer(ReturnLeases("trainer", (lease.lease_id,)))
            else:
                buffer.complete(lease)
        buffer.train(buffer.status().step + 1)


def held_out_leases(buffer, actor="actor-0", most=100, version=None):
    return [lease for lease in buffer.lease(actor, most, version) if lease.kind == "eval"]


def put(buffer, lease, success=1.0, **more):
    error = {"error": more.pop("error")} if "error" in more else {}
    made = member(lease, 0, reward=success, version=lease.version, **more)
    return buffer(PutTrajectory(replace(made, metrics={"success": success}, **error)))


def reports(buffer):
    return [metrics for _, role, _, _, metrics in buffer.status().reports if role == "eval"]


def test_it_is_due_after_every_so_many_steps_and_leased_first(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 1)
    assert held_out_leases(buffer, "early") == []
    buffer(ReturnLeases("early", tuple(lease.lease_id for lease in buffer.lease("early"))))
    train_to(buffer, 2)
    leases = buffer.lease(most=4)
    assert [(lease.kind, lease.epoch, lease.prompt_index) for lease in leases[:3]] == [
        ("eval", 2, prompt) for prompt in range(3)
    ]
    assert [lease.kind for lease in leases[3:]] == ["train"]


def test_its_leases_take_no_place_from_training(open_buffer):
    buffer = open_buffer(every=1)
    train_to(buffer, 1)
    kinds = [lease.kind for lease in buffer.lease()]
    assert kinds.count("eval") == PROMPTS and kinds.count("train") == 1  # of two places one is ready
    assert buffer.grant().reason == "capacity"


def test_only_engines_with_its_weights_or_newer_ones_get_it(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    assert held_out_leases(buffer, "behind", version=1) == []
    assert len(held_out_leases(buffer, "level", version=2)) == PROMPTS


def test_the_result_is_reported_once_with_the_versions_that_sampled_it(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    first, second, third = held_out_leases(buffer)
    put(buffer, first, 1.0)
    put(buffer, second, 0.0)
    assert reports(buffer) == []
    made = member(third, 0, reward=1.0, version=4)
    buffer(PutTrajectory(replace(made, metrics={"success": 1.0})))
    (metrics,) = reports(buffer)
    assert metrics[names.EVAL_STEP] == metrics[names.EVAL_VERSION] == 2
    assert (metrics[names.EVAL_VERSION_MIN], metrics[names.EVAL_VERSION_MAX]) == (2, 4)
    assert metrics[names.EVAL_SUCCESS] == pytest.approx(2 / 3) and metrics[names.EVAL_PROMPTS] == 3
    assert metrics[names.EVAL_LOW] < 2 / 3 < metrics[names.EVAL_HIGH]
    assert buffer.status().held_out == {"leased": 3, "done": 3, "running": 0, "dropped": 0}
    assert len(reports(buffer)) == 1 and buffer.broker.audit() == []


def test_what_could_not_be_scored_is_no_failure(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    first, second, third = held_out_leases(buffer)
    put(buffer, first, 1.0)
    put(buffer, second, 1.0)
    put(buffer, third, 0.0, error="the judge is down")
    (metrics,) = reports(buffer)
    assert metrics[names.EVAL_SUCCESS] == 1.0
    assert (metrics[names.EVAL_PROMPTS], metrics[names.EVAL_UNSCORED]) == (2, 1)


def test_nothing_of_it_is_trained_and_the_training_ledger_does_not_know_it(open_buffer):
    buffer = open_buffer(every=1)
    train_to(buffer, 1)
    leases = held_out_leases(buffer, most=PROMPTS)
    before = buffer.places()
    for lease in leases:
        put(buffer, lease)
    assert buffer.places() == before
    trained = {one.group_id for group in members(buffer.batch(2)) for one in group}
    assert trained.isdisjoint(lease.group_id for lease in leases)


def test_a_dead_actors_prompts_go_to_others_and_are_put_once_m1(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    leases = held_out_leases(buffer, "dead")
    buffer.pass_time(120)
    again = held_out_leases(buffer, "alive")
    assert {lease.prompt_index for lease in again} == {0, 1, 2}
    assert {lease.lease_id for lease in again}.isdisjoint(lease.lease_id for lease in leases)
    assert put(buffer, leases[0]) == PutAck(stored=True, duplicate=False)
    assert put(buffer, again[0]) == PutAck(stored=False, duplicate=True)
    assert buffer.beat("alive", *again, version=2).lost == (again[0].lease_id,)


def test_a_dead_actors_prompts_go_to_others_when_its_death_is_told(open_buffer):
    buffer = open_buffer()
    train_to(buffer, 2)
    leases = held_out_leases(buffer, "dead")
    buffer(Gone(("dead",)))
    again = held_out_leases(buffer, "actor-1")
    assert [one.group_id for one in again] == [one.group_id for one in leases]


def test_a_prompt_that_kills_its_actors_is_given_up_as_unscored(open_buffer):
    buffer = open_buffer(every=2, held_out=1)
    train_to(buffer, 2)
    for attempt in range(MAX_EXPIRIES):
        assert held_out_leases(buffer, f"victim-{attempt}", most=1)
        buffer.pass_time(120)
    (metrics,) = reports(buffer)
    assert (metrics[names.EVAL_PROMPTS], metrics[names.EVAL_UNSCORED]) == (0, 1)
    assert names.EVAL_SUCCESS not in metrics and buffer.broker.audit() == []


def test_a_crash_of_the_buffer_loses_no_result_and_takes_no_lease_away(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    first, second = held_out_leases(buffer, most=2)
    put(buffer, first)
    buffer.crash()
    assert buffer.beat("actor-0", second, version=2).lost == ()
    (third,) = held_out_leases(buffer)
    assert third.prompt_index == 2
    put(buffer, second)
    buffer.crash()
    put(buffer, third, 0.0)
    assert reports(buffer)[0][names.EVAL_SUCCESS] == pytest.approx(2 / 3)
    assert buffer.broker.audit() == []


def test_a_resume_forgets_what_was_measured_of_lost_weights_and_measures_again(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 4)
    lost = held_out_leases(buffer)
    put(buffer, lost[0], 0.0)
    buffer(Resume(2, 2))
    assert put(buffer, lost[1]) == PutAck(stored=False, duplicate=False)
    assert held_out_leases(buffer, version=4) == []  # that of step 2 was closed when the next was due
    train_to(buffer, 4)
    again = held_out_leases(buffer, "again")
    assert [lease.prompt_index for lease in again] == [0, 1, 2]
    assert buffer.status().balanced and buffer.broker.audit() == []


def test_a_checkpoint_newer_than_the_commit_opens_it_too_m2(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 1)
    for lease in buffer.lease():
        buffer.complete(lease)
    assert buffer.batch(2) is not None
    buffer(Resume(2, 2))
    assert len(held_out_leases(buffer)) == PROMPTS


def test_the_next_one_closes_the_one_before_with_what_it_has(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    first, second = held_out_leases(buffer, "slow", most=2)
    put(buffer, first)
    train_to(buffer, 4)
    (metrics,) = reports(buffer)
    assert (metrics[names.EVAL_STEP], metrics[names.EVAL_PROMPTS], metrics[names.EVAL_MISSING]) == (2, 1, 2)
    assert buffer.beat("slow", second, version=4).lost == (second.lease_id,)
    assert put(buffer, second) == PutAck(stored=False, duplicate=False)
    assert buffer.broker.audit() == []


def test_the_end_of_the_run_closes_it_and_the_last_step_opens_none(open_buffer):
    buffer = open_buffer(every=2, steps=4)
    train_to(buffer, 3)
    put(buffer, held_out_leases(buffer)[0])
    train_to(buffer, 4)
    assert [metrics[names.EVAL_STEP] for metrics in reports(buffer)] == [2]
    counts = buffer.status().held_out
    assert counts["running"] == 0 and counts["leased"] == counts["done"] + counts["dropped"]
    assert buffer.broker.audit() == []


def test_leases_handed_back_go_to_others(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    leases = held_out_leases(buffer, "leaving")
    buffer(ReturnLeases("leaving", (leases[0].lease_id,)))
    assert held_out_leases(buffer, "other", most=-1) == []
    assert [lease.prompt_index for lease in held_out_leases(buffer, "other")] == [0]
    buffer(Heartbeat("actor", "leaving", version=2, state="finished"))
    assert [lease.prompt_index for lease in held_out_leases(buffer, "other")] == [1, 2]


def test_other_held_out_data_on_a_resumed_run_ends_the_one_that_was_open(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    held_out_leases(buffer)
    buffer.num_held_out = 2
    buffer.crash()
    assert held_out_leases(buffer) == [] and buffer.broker.audit() == []
    train_to(buffer, 4)
    assert len(held_out_leases(buffer)) == 2


def test_a_put_that_names_no_prompt_is_refused(open_buffer):
    buffer = open_buffer(every=2)
    train_to(buffer, 2)
    lease = held_out_leases(buffer)[0]
    for name in ("eval-x-0", "eval-2-1", "eval-", f"eval-{2**63}-0"):
        assert isinstance(put(buffer, replace(lease, group_id=name)), Refused)
