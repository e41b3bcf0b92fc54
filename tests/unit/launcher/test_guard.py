"""The guard, on real processes: what it watches is killed without warning."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from launcher.guard import kill_group, start_guard

SLEEP = [sys.executable, "-IS", "-c", "import time; print(flush=True); time.sleep(60)"]
PARENT = [
    *(sys.executable, "-IS", "-c"),
    f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(60)",
]


def start(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()  # it is up, and so is its child if it has one
    return process


def is_gone(process):
    """All that held the process's stdout open, its children too, are gone."""
    process.stdout.read()
    process.wait(10)
    return True


def has_ended(pid):
    """Nobody reaps a detached process at once, so a zombie has ended too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=10)
    return True


def test_the_group_goes_when_the_watched_process_is_killed():
    parent = start(PARENT)
    guard = start_guard(parent.pid, [-parent.pid])
    os.kill(parent.pid, signal.SIGKILL)  # its child stays, in the group
    assert is_gone(parent)
    assert has_ended(guard)


def test_single_processes_go_too():
    watched, victim = start(SLEEP), start(SLEEP)
    guard = start_guard(watched.pid, [victim.pid])
    watched.kill()
    assert is_gone(victim) and victim.returncode == -signal.SIGKILL
    assert has_ended(guard)
    watched.wait(10)


def test_a_watched_process_that_is_gone_already_counts():
    victim = start(SLEEP)
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    start_guard(dead.pid, [victim.pid])
    assert is_gone(victim)


def test_a_group_that_is_gone_is_no_error():
    process = start(SLEEP)
    kill_group(process.pid)
    process.wait(10)
    kill_group(process.pid)
