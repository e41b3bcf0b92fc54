"""Roles as real Ray actors: their environment, their logs, how they end, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.schema import RunConfig
from launcher.interfaces import Died, Done, Running
from launcher.ray_roles import RayRoles, cluster
from tests.integration.processes import is_gone, left_alive
from tests.integration.small_roles import MODULE, spec

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


def wait_until(condition, what):
    """Poll a condition on other processes until it holds."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.05)
    return value


def end_of(roles, handle):
    return wait_until(lambda: (end := roles.poll(handle)) != Running() and end, handle.name)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder whose path is too long for Ray's sockets."""
    folder = tmp_path_factory.mktemp("a-run-folder-with-a-name-that-is-longer-than-a-socket-path-may-be")
    before = set(psutil.Process().children(recursive=True))
    with cluster(RunConfig(), folder, 0):
        yield folder
    left = set(psutil.Process().children(recursive=True)) - before
    wait_until(lambda: all(is_gone(p) or p.name().startswith("python") for p in left), "Ray is gone")


@pytest.fixture(scope="module")
def roles(run_dir):
    mains = {"buffer": f"{MODULE}:returns", "actor": f"{MODULE}:stays", "learner": f"{MODULE}:raises"}
    return RayRoles(RunConfig(), "cpu", mains)


def test_a_role_has_its_threads_and_its_output_is_in_its_log(roles, run_dir):
    (run_dir / "mcp.py").write_text("raise ImportError('a file beside the config hides a package')\n")
    assert end_of(roles, roles.start(spec(run_dir, "buffer", "buffer"))) == Done()
    log = (run_dir / "logs" / "buffer.log").read_text()
    assert "threads 3 rank 0" in log and "from a child" in log
    assert "site-packages/mcp" in log


def test_a_role_that_raises_has_died_of_its_exception(roles, run_dir):
    died = end_of(roles, roles.start(spec(run_dir, "learner", "learner-0")))
    assert isinstance(died, Died) and died.cause == "EndsRun: no such thing"
    assert died.time is not None and died.final
    assert "Traceback" in (run_dir / "logs" / "learner-0.log").read_text()


@pytest.mark.parametrize("end", ["kill", "kill -9"])
def test_a_killed_role_takes_its_children_with_it(roles, run_dir, end):
    name = f"actor-{end.replace(' ', '')}"
    handle = roles.start(spec(run_dir, "actor", name))
    log = run_dir / "logs" / f"{name}.log"
    wait_until(lambda: log.exists() and "staying" in log.read_text(), "the role runs")
    process = psutil.Process(int(log.read_text().split("pid ")[1].split()[0]))
    family = wait_until(
        lambda: len(f := process.children(recursive=True)) >= 2 and [process, *f], "two children"
    )
    if end == "kill":
        roles.kill(handle)
    else:
        os.kill(process.pid, signal.SIGKILL)
        died = end_of(roles, handle)
        assert died == Died("its process died without an exception: killed, or out of memory")
    assert left_alive(family, DEADLINE_S) == []


def test_an_actor_beyond_the_places_reserved_at_the_start_finds_one(roles, run_dir):
    more = [spec(run_dir, "actor", f"actor-{rank}", rank) for rank in (1, 2)]
    assert roles.room(more) == 2
    handle = roles.start(more[1])
    log = run_dir / "logs" / "actor-2.log"
    wait_until(lambda: log.exists() and "staying" in log.read_text(), "the added actor runs")
    roles.kill(handle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_launcher(tmp_path, number):
    launcher = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "started\n"
    log = tmp_path / "logs" / "actor-0.log"
    wait_until(lambda: log.exists() and "staying" in log.read_text(), "the role runs")
    role = psutil.Process(int(log.read_text().split("pid ")[1].split()[0]))
    wait_until(lambda: len(role.children(recursive=True)) >= 2, "the role has a grandchild")
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) > 5  # Ray's servers, the role and its children
    launcher.send_signal(number)
    launcher.wait(30)
    assert left_alive(family, DEADLINE_S) == []
