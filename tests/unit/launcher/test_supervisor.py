"""The restart policy and the ends of a run, on fake processes and a clock that the test moves."""

from pathlib import Path

import pytest

from configs.roles import RoleSpec
from configs.schema import RunConfig
from launcher.interfaces import Died, Done, End, Outcome
from launcher.supervisor import (
    BACK_AT_THE_BUFFER_S,
    FINISH_GRACE_S,
    MAX_BUFFER_RESTARTS,
    STOP_GRACE_S,
    Supervisor,
)
from tests.fakes import FakeClock, FakeRoles, FakeStatusBuffer

NAMES = ("buffer", "actor-0", "actor-1", "learner-0", "learner-1")


def spec(name):
    role, _, rank = name.partition("-")
    return RoleSpec(
        role=role,
        name=name,
        rank=int(rank or 0),
        world=2 if role == "learner" else 1,
        config=RunConfig(),
        run_dir=Path("run"),
        run_id="r",
        config_dir=Path("."),
        model_path=Path("model"),
        num_prompts=10,
        buffer_endpoint="tcp://127.0.0.1:1",
        device="cpu",
        threads=1,
    )


class Run:
    """A supervisor with its fakes; `go` moves the clock and ticks."""

    def __init__(self, **sections):
        self.clock, self.roles, self.buffer = FakeClock(), FakeRoles(), FakeStatusBuffer()
        self.events, self.statuses = [], []
        self.supervisor = Supervisor(
            [spec(name) for name in NAMES],
            self.roles,
            self.buffer,
            RunConfig.model_validate(sections),
            self.clock,
            self.events.append,
            self.statuses.append,
        )

    def go(self, seconds=1.0):
        self.clock.now += seconds
        return self.supervisor.tick()

    def until_ready(self):
        self.go()
        self.buffer.heard = dict.fromkeys(NAMES[1:], 0.0)
        self.go()
        return self

    def kinds(self, role):
        return [event.kind for event in self.events if event.role == role]

    @property
    def outcome(self):
        return self.supervisor.outcome


def test_all_roles_start_at_once_and_are_ready_when_the_buffer_has_heard_them():
    run = Run()
    run.go()
    assert [spec.name for spec in run.roles.started] == list(NAMES)
    assert run.kinds("actor-0") == ["start"]
    run.buffer.heard = dict.fromkeys(NAMES[1:4], 0.0)
    run.go()
    assert run.kinds("actor-0") == ["start", "ready"] and run.kinds("learner") == ["start"]
    run.buffer.heard["learner-1"] = 0.0
    run.go()
    assert run.kinds("learner") == ["start", "ready"]


def test_learner_ranks_share_a_rendezvous_that_is_new_at_every_start():
    run = Run().until_ready()
    first = {spec.master for spec in run.roles.started if spec.role == "learner"}
    run.roles.end("learner-1", Died("killed"))
    run.go()
    second = {spec.master for spec in run.roles.started[5:] if spec.role == "learner"}
    assert len(first) == len(second) == 1 and first != second


def test_a_dead_actor_is_replaced_and_the_others_stay():
    run = Run().until_ready()
    run.roles.end("actor-0", Died("killed"))
    run.go()
    assert [run.roles.starts(name) for name in NAMES] == [1, 2, 1, 1, 1]
    assert run.kinds("actor-0") == ["start", "ready", "restart", "start"]
    text = next(event.text for event in run.events if event.kind == "restart")
    assert text == "actor-0 died (killed); actor-0 starts again now, restart 1 of at most 10"


def test_what_a_dead_actor_had_leased_is_given_to_others_at_once():
    run = Run().until_ready()
    run.roles.end("actor-0", Died("killed"))
    run.go()
    assert run.buffer.released == ["actor-0"]


def test_a_buffer_that_is_dead_too_is_not_asked_to_release():
    run = Run().until_ready()
    for name in ("buffer", "actor-0", "actor-1"):
        run.roles.end(name, Died("killed"))
    run.go()
    assert run.buffer.released == []


def test_a_role_that_was_heard_before_it_died_is_not_taken_for_its_successor():
    run = Run().until_ready()
    run.roles.end("actor-0", Died("killed"))
    run.buffer.heard["actor-0"] = 3.0  # the old process, three seconds ago
    run.go()
    run.go()
    assert run.kinds("actor-0")[-1] == "start"
    run.buffer.heard["actor-0"] = 0.1
    run.go()
    assert run.kinds("actor-0")[-1] == "ready"


def test_a_dead_learner_rank_restarts_all_ranks():
    run = Run().until_ready()
    run.roles.end("learner-0", Died("killed"))
    run.go()
    assert run.roles.killed == ["learner-0", "learner-1"]
    assert [run.roles.starts(name) for name in NAMES] == [1, 1, 1, 2, 2]


def test_of_ranks_that_die_together_the_killed_one_is_the_cause():
    run = Run().until_ready()
    run.roles.end("learner-0", Died("ConnectionResetError", time=5.0))
    run.roles.end("learner-1", Died("killed"))
    run.go()
    assert "learner-1 died (killed)" in next(event.text for event in run.events if event.kind == "restart")


def test_of_ranks_that_raise_the_first_is_the_cause():
    run = Run().until_ready()
    run.roles.end("learner-0", Died("ConnectionResetError", time=5.0))
    run.roles.end("learner-1", Died("ValueError: bad batch", time=4.0))
    run.go()
    assert "bad batch" in next(event.text for event in run.events if event.kind == "restart")


def test_a_dead_buffer_is_restarted_with_the_same_spec_and_only_new_reports_are_asked_for():
    run = Run().until_ready()
    run.buffer.reports = ((7, "actor", "actor-0", 0.0, {"m": 1.0}),)
    run.go()
    run.go()
    assert run.buffer.asked_since[-1] == 7
    run.roles.end("buffer", Died("killed"))
    run.go()
    assert run.roles.starts("buffer") == 2 and run.roles.started[-1] == run.roles.started[0]
    assert run.buffer.asked_since[-1] == 7


def test_early_deaths_in_a_row_are_restarted_with_a_growing_delay():
    run = Run().until_ready()
    delays = []
    for _ in range(3):
        run.roles.end("actor-0", Died("killed"))
        died = run.clock.now
        starts = run.roles.starts("actor-0")
        while run.roles.starts("actor-0") == starts:
            run.go()
        delays.append(run.clock.now - died - 1)
        run.buffer.heard["actor-0"] = 0.0
        run.go()
    assert delays == [0.0, 4.0, 8.0]
    run.go(100)
    run.roles.end("actor-0", Died("killed"))
    run.go()
    assert run.roles.starts("actor-0") == 5  # it had lived long: at once again


def test_actors_share_one_budget_of_restarts():
    run = Run(actors={"max_restarts": 1}).until_ready()
    run.roles.end("actor-0", Died("killed"))
    run.go()
    run.buffer.heard["actor-0"] = 0.0
    run.go()
    run.roles.end("actor-1", Died("killed"))
    assert run.go() is False
    assert run.outcome.end is End.FAILED and run.outcome.role == "actor-1"
    assert run.outcome.message == "actor-1: killed (no restart left: actors.max_restarts = 1)"


def test_the_learner_and_the_buffer_have_budgets_too():
    run = Run(learner={"max_restarts": 0}).until_ready()
    run.roles.end("learner-0", Died("killed"))
    run.go()
    assert run.outcome.message == "learner-0: killed (no restart left: learner.max_restarts = 0)"
    run = Run().until_ready()
    for _ in range(MAX_BUFFER_RESTARTS + 1):
        run.roles.end("buffer", Died("killed"))
        for _ in range(40):
            run.go()
    assert run.outcome.end is End.FAILED and run.outcome.role == "buffer"


def test_an_error_that_no_restart_cures_ends_the_run():
    run = Run().until_ready()
    run.roles.end("learner-1", Died("TrainingDiverged: 3 updates in a row", 1.0, final=True))
    assert run.go() is False
    assert run.supervisor.outcome == Outcome(
        End.FAILED, "learner-1: TrainingDiverged: 3 updates in a row", "learner-1"
    )
    assert run.roles.starts("learner-0") == 1


def test_a_role_that_fails_twice_before_it_is_ready_ends_the_run_with_the_first_cause():
    run = Run()
    run.go()
    run.roles.end("actor-1", Died("ValueError: no such file", time=1.0))
    assert run.go() is True
    run.roles.end("actor-1", Died("OSError: address in use", time=2.0))
    assert run.go() is False
    assert run.outcome.end is End.FAILED
    assert run.outcome.message == "actor-1: ValueError: no such file" and run.outcome.role == "actor-1"
    assert set(run.roles.killed) >= {"buffer", "actor-0", "learner-0", "learner-1"}
    assert run.events[-1].kind == "fail"


def test_a_failed_start_is_forgiven_once_the_role_has_been_ready():
    run = Run()
    run.go()
    run.roles.end("actor-0", Died("killed"))
    run.go()
    run.buffer.heard = dict.fromkeys(NAMES[1:], 0.0)
    run.go()
    run.roles.end("actor-0", Died("killed"))
    assert run.go() is True


def test_a_role_that_is_never_ready_ends_the_run_at_the_deadline():
    run = Run(launch={"startup_timeout_s": 30})
    run.go()
    run.buffer.heard = dict.fromkeys(NAMES[1:4], 0.0)
    run.go()
    assert run.go(31) is False
    assert "not ready within launch.startup_timeout_s = 30 s" in run.outcome.message
    assert run.outcome.role == "learner-0"


def test_a_silent_actor_is_replaced_when_its_leases_would_expire():
    run = Run(buffer={"lease_timeout_s": 20}).until_ready()
    run.go(100)
    run.buffer.heard["actor-1"] = 19.0
    run.go()
    assert run.roles.killed == []
    run.buffer.heard["actor-1"] = 21.0
    run.go()
    run.go()
    assert run.roles.killed == ["actor-1"] and run.roles.starts("actor-1") == 2


def test_a_silent_actor_is_replaced_though_the_buffer_has_forgotten_it():
    run = Run(buffer={"lease_timeout_s": 20}).until_ready()
    run.go()
    run.roles.end("buffer", Died("killed"))
    run.go()
    del run.buffer.heard["actor-1"]  # it hangs, and the new buffer never hears of it
    run.go(BACK_AT_THE_BUFFER_S + 18)
    run.buffer.heard["actor-0"] = 0.0
    run.go()
    assert run.roles.killed == ["buffer"]
    run.go(3)
    assert run.roles.killed == ["buffer", "actor-1"]


def test_a_buffer_that_does_not_answer_is_restarted():
    run = Run(buffer={"lease_timeout_s": 20}).until_ready()
    run.buffer.silent = True
    run.go(19)
    assert run.roles.killed == []
    run.go(2)
    assert run.roles.killed == ["buffer"]
    run.go()
    assert run.roles.starts("buffer") == 2


def test_an_actor_that_leaves_early_counts_as_dead():
    run = Run().until_ready()
    run.roles.end("actor-0", Done())
    run.go()
    assert "actor-0 died (it ended before the run did)" in run.events[-1].text
    run.go()
    assert run.roles.starts("actor-0") == 2


def finish(run):
    run.buffer.finished, run.buffer.step = True, 100
    for name in ("learner-0", "learner-1"):
        run.roles.end(name, Done())


def test_a_finished_run_waits_for_its_actors_and_ends_well():
    run = Run().until_ready()
    finish(run)
    assert run.go() is True
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    assert run.go() is False
    assert run.outcome.end is End.FINISHED
    assert run.outcome.message == "100 steps trained; ledger: leased 4 = trained 3 + running 1"
    assert run.roles.killed.count("buffer") == 1
    assert run.statuses[-1].finished


def test_one_rank_that_is_done_does_not_end_the_run():
    run = Run().until_ready()
    run.roles.end("learner-0", Done())
    assert run.go() is True and run.go() is True


def test_m6_a_rank_that_hangs_in_its_end_is_started_again_with_the_others():
    run = Run(learner={"timeout_s": 50}).until_ready()
    run.roles.end("learner-0", Done())
    run.go()
    run.go(99)
    assert run.roles.starts("learner-0") == 1
    run.go(2)
    text = run.events[-2].text
    assert "learner-1 died (it did not end within 100 s of learner-0)" in text
    assert run.roles.starts("learner-0") == run.roles.starts("learner-1") == 2


def test_actors_that_do_not_end_after_the_last_step_are_killed():
    run = Run().until_ready()
    finish(run)
    run.go()
    run.roles.end("actor-0", Done())
    assert run.go(FINISH_GRACE_S + 1) is False
    assert run.outcome.end is End.FINISHED
    assert "actor-1" in run.roles.killed


def test_an_actor_that_is_about_to_start_does_not_hold_up_the_end():
    run = Run().until_ready()
    for name in ("actor-0", "actor-1"):
        run.roles.end(name, Died("killed"))
    run.go()
    run.buffer.heard = {"actor-1": 0.0}
    run.go()
    run.roles.end("actor-1", Died("killed"))
    run.go()
    assert run.roles.starts("actor-0") == 2 and run.roles.starts("actor-1") == 2  # starting, and waiting to
    finish(run)
    run.go()
    assert run.outcome.end is End.FINISHED and run.roles.starts("actor-1") == 2


def test_an_actor_that_dies_after_the_last_step_is_not_replaced():
    run = Run().until_ready()
    finish(run)
    run.go()
    run.roles.end("actor-0", Died("killed"))
    run.roles.end("actor-1", Done())
    assert run.go() is False
    assert run.roles.starts("actor-0") == 1 and run.outcome.end is End.FINISHED


def test_a_ledger_that_does_not_balance_fails_the_run_and_is_shown():
    run = Run().until_ready()
    finish(run)
    run.go()
    run.buffer.balanced = False
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    run.clock.now -= 1.0  # no status in between: the last one is asked for at the end
    run.go()
    assert run.outcome.end is End.FAILED
    assert run.outcome.message == "the ledger does not balance: leased 4 = trained 3 + running 1"


def test_an_imbalance_found_at_a_checkpoint_ends_the_run_at_once_with_the_ids():
    run = Run().until_ready()
    run.buffer.balanced, run.buffer.imbalance = False, ("ready in the index or the store alone: 0-7",)
    assert run.go() is False
    assert run.outcome.end is End.FAILED and run.outcome.role == "buffer"
    assert "does not balance" in run.outcome.message and "0-7" in run.outcome.message


def test_m7_a_learner_that_returns_before_the_last_step_is_a_failure():
    run = Run().until_ready()
    run.roles.end("learner-0", Done())
    run.roles.end("learner-1", Done())
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    for _ in range(5):
        run.go()
    assert run.outcome.end is End.FAILED and run.outcome.role == "learner-0"


def test_a_buffer_that_is_gone_at_the_end_is_a_failure_within_the_deadline():
    run = Run().until_ready()
    finish(run)
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    run.buffer.silent = True
    assert run.go() is True
    assert run.go(2 * FINISH_GRACE_S + 1) is False
    assert run.outcome.end is End.FAILED and "ledger is unknown" in run.outcome.message


def test_stop_drains_the_actors_and_ends_as_soon_as_they_are_gone():
    run = Run().until_ready()
    run.supervisor.stop()
    assert run.buffer.drained == ["actor-0", "actor-1"]
    assert run.go() is True
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    assert run.go() is False
    assert run.outcome.end is End.STOPPED
    assert set(run.roles.killed) >= {"buffer", "learner-0", "learner-1"}


def test_stop_kills_what_does_not_end_in_time():
    run = Run().until_ready()
    run.supervisor.stop()
    assert run.go(STOP_GRACE_S + 1) is False
    assert run.outcome.end is End.STOPPED and set(run.roles.killed) == set(NAMES)


def test_nothing_is_restarted_while_stopping():
    run = Run().until_ready()
    run.supervisor.stop()
    run.roles.end("actor-0", Died("killed"))
    run.roles.end("learner-0", Died("killed"))
    run.go()
    assert [run.roles.starts(name) for name in NAMES] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("ready", [True, False])
def test_stop_works_in_every_phase(ready):
    run = Run()
    if ready:
        run.until_ready()
    run.supervisor.stop()
    run.supervisor.stop()  # a second request changes nothing
    assert run.go(STOP_GRACE_S + 1) is False
    assert run.outcome.end is End.STOPPED
