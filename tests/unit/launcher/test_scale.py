"""`scale`: what the supervisor does with another number of actors, and what the command says."""

import io
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from buffer.client import BufferRefused
from buffer.messages import Heartbeat, Hello, Scale, Status
from configs.load import dump_toml
from configs.run_folder import RunFolder
from launcher import live, supervisor
from launcher.buffer_link import BufferLink
from launcher.interfaces import Died, Done, End
from launcher.preflight import PreflightError
from launcher.supervisor import STOP_GRACE_S
from tests.unit.buffer.served import TIMEOUT_S, buffer_spec, client, serving
from tests.unit.buffer.support import config
from tests.unit.launcher.test_supervisor import NAMES, Run, finish


def running(**sections):
    run = Run(**({"actors": {"count": 2}} | sections)).until_ready()
    run.go()
    assert run.buffer.actors_wanted == 2  # the config's number, told to the buffer
    return run


def scaled(run, actors):
    run.buffer.actors_wanted = actors
    run.go()
    run.go()
    return run


def actors_started(run):
    return [spec.name for spec in run.roles.started if spec.role == "actor"]


def test_scaling_up_starts_actors_under_the_next_names():
    run = scaled(running(), 4)
    assert actors_started(run) == ["actor-0", "actor-1", "actor-2", "actor-3"]
    assert run.roles.started[-1].rank == 3
    run.buffer.heard["actor-2"] = 0.0
    run.go()
    assert run.kinds("actor-2") == ["start", "ready"]


def test_scaling_down_drains_the_youngest_and_does_not_take_its_leaving_for_a_death():
    run = scaled(running(), 1)
    assert set(run.buffer.drained) == {"actor-1"} and "actor-1" not in run.roles.killed
    run.roles.end("actor-1", Done())
    for _ in range(3):
        run.go()
    assert run.roles.starts("actor-1") == 1 and run.roles.killed == [
        "actor-1"
    ]  # its process, once it is done
    assert run.kinds("actor-1")[-1] == "scale" and run.outcome is None
    scaled(run, 2)
    assert run.roles.starts("actor-1") == 2  # the name is free again


def test_an_actor_that_missed_the_drain_is_told_again_until_it_drains():
    run = scaled(running(), 1)
    told = len(run.buffer.drained)
    run.go()
    assert len(run.buffer.drained) == told + 1
    del run.buffer.heard["actor-1"]  # not running any more
    run.go()
    assert len(run.buffer.drained) == told + 1


def test_an_actor_that_does_not_leave_is_killed_and_its_leases_go_to_others():
    run = scaled(running(task={"trajectory_timeout_s": 30}), 1)
    run.go(30 + STOP_GRACE_S)
    assert run.roles.killed == ["actor-1"] and run.buffer.released == ["actor-1"]
    run.go()
    assert run.roles.starts("actor-1") == 1


def test_an_actor_that_dies_while_it_leaves_is_not_replaced():
    run = scaled(running(actors={"count": 2, "max_restarts": 0}), 1)
    run.roles.end("actor-1", Died("killed"))
    run.go()
    run.go()
    assert run.roles.starts("actor-1") == 1 and run.outcome is None
    assert run.buffer.released == ["actor-1"]


def test_without_room_the_run_settles_for_what_there_is_and_says_so():
    run = running()
    run.roles.places = 1
    scaled(run, 5)
    assert actors_started(run) == ["actor-0", "actor-1", "actor-2"]
    assert run.buffer.actors_wanted == 3
    assert "there is room for 1 of 3 more actors: the run goes on with 3 actors" in [
        event.text for event in run.events
    ]


def test_a_number_beyond_all_reason_is_not_prepared_for(monkeypatch):
    monkeypatch.setattr(supervisor, "MOST_ADDED", 2)
    run = scaled(running(), 5)
    assert actors_started(run) == ["actor-0", "actor-1", "actor-2", "actor-3"]
    assert run.buffer.actors_wanted == 4


def test_an_added_actor_that_cannot_start_is_given_up_and_the_run_goes_on():
    run = scaled(running(), 3)
    for cause in ("no memory", "no memory again"):
        run.roles.end("actor-2", Died(cause))
        run.go()
        run.go()
    assert run.outcome is None and run.buffer.actors_wanted == 2
    assert "actor-2 cannot start (no memory); the run goes on without it" in [e.text for e in run.events]


def test_an_added_actor_that_is_never_ready_is_given_up():
    run = scaled(running(launch={"startup_timeout_s": 30}), 3)
    run.go(31)
    run.go()
    assert run.outcome is None and "actor-2" in run.roles.killed


def test_a_new_launcher_starts_with_its_configs_number():
    run = Run(actors={"count": 2})
    run.buffer.actors_wanted = 7  # asked of the launcher before it
    run.until_ready()
    run.go()
    assert actors_started(run) == ["actor-0", "actor-1"] and run.buffer.actors_wanted == 2


def test_nothing_is_scaled_while_the_run_ends():
    run = running()
    finish(run)
    run.go()
    scaled(run, 4)
    assert actors_started(run) == ["actor-0", "actor-1"]
    run.roles.end("actor-0", Done())
    run.roles.end("actor-1", Done())
    run.go()
    assert run.outcome.end is End.FINISHED


# --- the command, on a buffer that is served --------------------------------------------------------


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "ANSWER_TIMEOUT_S", TIMEOUT_S)
    spec = buffer_spec(tmp_path, config(heartbeat_s=0.1))
    folder = RunFolder(tmp_path)
    folder.config.write_text(dump_toml(spec.config))
    folder.run_info.write_text('{"run_id": "run", "config_dir": "."}')
    folder.endpoint.write_text(spec.buffer_endpoint)
    return spec


def scale(spec, actors):
    console = Console(file=io.StringIO(), width=200)
    done = live.scale(spec.run_dir, actors, console)
    return done, console.file.getvalue()


def test_the_command_returns_when_the_actors_are_there(spec):
    with serving(spec), client(spec) as buffer:
        for name in NAMES[1:3]:
            buffer.call(Heartbeat("actor", name), TIMEOUT_S)
        buffer.call(Heartbeat("actor", "actor-9", state="finished"), TIMEOUT_S)
        done, said = scale(spec, 2)
    assert done and "2 actors: actor-0, actor-1" in said


def test_the_command_says_when_the_run_settles_for_fewer(spec, monkeypatch):
    with serving(spec), client(spec) as buffer:
        settle = threading.Event()
        # Of this module alone: the buffer, in a thread here, sleeps too.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: settle.wait(TIMEOUT_S))
        monkeypatch.setattr(live, "time", clock)

        def launcher():
            while buffer.call(Status(), TIMEOUT_S).actors_wanted != 9:
                pass
            buffer.call(Scale(1), TIMEOUT_S)
            settle.set()

        thread = threading.Thread(target=launcher)
        thread.start()
        done, said = scale(spec, 9)
        thread.join(TIMEOUT_S)
    assert not done and "goes on with 1 actors; the reason is in" in said


def test_a_run_that_is_not_going_on_is_one_sentence(spec, monkeypatch):
    monkeypatch.setattr(live, "ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(PreflightError, match=r"does not answer.*--resume"):
        scale(spec, 2)


def test_the_number_wanted_survives_a_restart_of_the_buffer_and_must_be_positive(spec):
    for _ in range(2):
        with serving(spec), client(spec) as buffer:
            buffer.call(Hello("launcher", "l"), TIMEOUT_S)
            if not buffer.call(Status(), TIMEOUT_S).actors_wanted:
                buffer.call(Scale(3), TIMEOUT_S)
                with pytest.raises(BufferRefused, match="at least 1 actor"):
                    buffer.call(Scale(0), TIMEOUT_S)
            assert buffer.call(Status(), TIMEOUT_S).actors_wanted == 3


def test_the_link_hands_back_the_leases_of_an_actor_that_was_removed(spec):
    from buffer.messages import LeaseRequest

    with serving(spec), client(spec) as buffer:
        (lease,) = buffer.call(LeaseRequest("actor-1", 1, 0), TIMEOUT_S).leases
        link = BufferLink(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "launcher")
        link.release("actor-1")
        link.close()
        (again,) = buffer.call(LeaseRequest("actor-0", 1, 0), TIMEOUT_S).leases
    assert again.group_id == lease.group_id


def test_status_prints_the_ledger_and_the_rates(spec):
    console = Console(file=io.StringIO(), width=200)
    with serving(spec), client(spec) as buffer:
        buffer.call(Heartbeat("actor", "actor-0", metrics={"actor/tokens_sampled": 5.0}), TIMEOUT_S)
        live.status(spec.run_dir, console)
    said = console.file.getvalue()
    assert "ledger balances: leased 0" in said and "actor-0" in said and "tok/s" in said
