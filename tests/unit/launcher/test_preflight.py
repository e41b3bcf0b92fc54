"""What is refused before a model loads, and how a machine is shared."""

import multiprocessing
import os
import socket
import threading
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from configs.schema import RunConfig
from launcher.preflight import (
    PreflightError,
    check_learner,
    check_sinks,
    choose_endpoint,
    find_gpus,
    plan_resources,
    run_lock,
    run_module,
)


def config(**sections):
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("actors", "learners", "cores", "threads", "words"),
    [
        (1, 1, 2, (1, 1), "2 cores: 1 thread for each of 1 engine, 1 thread for each of 1 learner"),
        (1, 1, 8, (1, 7), "8 cores: 1 thread for each of 1 engine, 7 threads for each of 1 learner"),
        (2, 2, 8, (1, 3), "8 cores: 1 thread for each of 2 engines, 3 threads for each of 2 learners"),
    ],
)
def test_cores_are_shared_between_engines_and_learners(actors, learners, cores, threads, words):
    plan = plan_resources(config(actors={"count": actors}, learner={"count": learners}), cores, 0)
    assert (plan.actor_threads, plan.learner_threads) == threads
    assert plan.words == words and plan.device == "cpu"


def test_too_few_cores_are_said():
    plan = plan_resources(config(actors={"count": 2}, learner={"count": 2}), 2, 0)
    assert plan.words.endswith("(4 threads take turns on 2 cores)")


def test_threads_that_are_set_are_kept():
    plan = plan_resources(config(actors={"threads": 3}, learner={"threads": 5}), 16, 0)
    assert (plan.actor_threads, plan.learner_threads) == (3, 5)


def test_gpus_make_it_cuda():
    plan = plan_resources(config(actors={"count": 4}, learner={"count": 4}), 64, 8)
    assert plan.device == "cuda" and plan.gpus == 8 and plan.actor_threads == 8
    assert plan.words.endswith("8 GPUs: 1 for each engine, 1 for each learner")


def test_more_gpus_asked_than_there_are_is_refused_with_the_numbers():
    with pytest.raises(
        PreflightError, match=r"5 actors with 1 and 4 learners with 1 GPUs each need 9, .* has 8"
    ):
        plan_resources(config(actors={"count": 5}, learner={"count": 4}), 64, 8)
    shared = config(launch={"gpus_per_actor": 0.5, "gpus_per_learner": 0.5})
    assert plan_resources(shared, 16, 1).gpus == 1


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"offload": "optimizer", "zero_stage": 1}, "learner.offload"),
        ({"attention": "flash_attention_2", "shared_prefix": False}, "learner.attention"),
    ],
)
def test_what_only_a_gpu_has_is_refused_without_one(learner, key):
    with pytest.raises(PreflightError, match=f"{key} = .* this machine has no"):
        check_learner(config(learner=learner), "cpu")
    check_learner(config(learner=learner), "cuda")


def test_the_gpus_that_may_be_used_are_counted(monkeypatch):
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("0,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert find_gpus() == count


def test_a_port_that_is_taken_is_refused_with_the_mend():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PreflightError, match=rf"buffer.port = {port} .*Address already in use.*buffer.port = 0"
        ):
            choose_endpoint(config(buffer={"port": port}))


def test_a_port_is_chosen_if_none_is_asked_for():
    endpoint = choose_endpoint(config())
    assert endpoint.startswith("tcp://127.0.0.1:")
    # Not where the kernel gives out ports to anyone in the meantime.
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < int(endpoint.rpartition(":")[2]) < low


def test_an_address_that_nobody_can_connect_to_is_refused():
    with pytest.raises(PreflightError, match=r"buffer\.host = '0\.0\.0\.0' is no address"):
        choose_endpoint(config(buffer={"host": "0.0.0.0"}))
    with pytest.raises(PreflightError, match=r"buffer\.host = '203\.0\.113\.9' cannot be used"):
        choose_endpoint(config(buffer={"host": "203.0.113.9"}))


def test_a_missing_sink_library_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="tensorboard, which is not installed"):
        check_sinks(config(launch={"sinks": ["tensorboard"]}))


def _hold(root, held, release):
    with run_lock(RunFolder(root)):
        held.set()
        release.wait(30)


def test_a_run_folder_in_use_is_refused_and_free_again_when_its_launcher_is_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    root = tmp_path / "run"
    holder = context.Process(target=_hold, args=(root, held, release))
    holder.start()
    assert held.wait(30)
    with (
        pytest.raises(PreflightError, match=f"in use by process {holder.pid}; stop that run first"),
        run_lock(RunFolder(root)),
    ):
        pass
    os.kill(holder.pid, 9)
    holder.join(10)
    with run_lock(RunFolder(root)):
        assert root.exists()


def test_a_folder_that_got_nothing_but_the_lock_goes_again(tmp_path):
    root = tmp_path / "runs" / "x"
    with pytest.raises(PreflightError), run_lock(RunFolder(root)):
        raise PreflightError("refused")
    assert not root.exists()
    with run_lock(RunFolder(root)):
        (root / "config.toml").write_text("")
    assert root.exists()


def test_a_module_that_says_more_than_a_pipe_holds_is_read(tmp_path, monkeypatch):
    (tmp_path / "talks.py").write_text("import sys\nprint('x' * 2**20)\nprint('so far', file=sys.stderr)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = []
    thread = threading.Thread(target=lambda: said.append(run_module("talks", [], "talking")), daemon=True)
    thread.start()
    thread.join(60)
    assert said == ["x" * 2**20]


def test_a_module_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("import sys\nprint('half')\nsys.exit('error: no such thing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PreflightError, match=r"^no such thing$"):
        run_module("fails", [], "failing")
