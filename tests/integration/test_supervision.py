"""kill -9 of the buffer and of a learner rank in a real run: the run goes on to its last step."""

import os
import signal

import pytest

from tests.integration.runs import launch, start, steps_of, write_task

pytestmark = pytest.mark.slow

STEPS = 40  # so many that the kill comes before the last, on a fast machine too


def pid_of(run_dir, role):
    """The newest process of the role, by its log."""
    return int((run_dir / "logs" / f"{role}.log").read_text().split(", pid ")[-1].split()[0])


@pytest.mark.parametrize("role", ["buffer", "learner-1"])
def test_a_killed_role_is_restarted_and_every_step_is_trained(tmp_path, role):
    config = write_task(tmp_path)
    options = ("--learners", "2", "--steps", str(STEPS), "--launch.runs_dir", str(tmp_path), "--name", "t")
    process = start("--config", str(config), *options)
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith(f"step 2/{STEPS}"):
            os.kill(pid_of(tmp_path / "t", role), signal.SIGKILL)
            break
    rest, _ = process.communicate(timeout=300)
    output.append(rest)
    text = "".join(output)
    assert process.returncode == 0, text
    assert f"{role} died (its process died without an exception" in text
    assert sorted(set(steps_of(tmp_path / "t"))) == list(range(1, STEPS + 1))
    assert "leased" in text.splitlines()[-2] and "export" in text.splitlines()[-1]


def test_m7_a_role_that_cannot_start_ends_the_run_with_the_cause_last(tmp_path):
    config = write_task(tmp_path)
    # Passes every check before the start; the learner alone cannot do it.
    done = launch(
        *("--config", str(config), "--launch.runs_dir", str(tmp_path), "--name", "t"),
        *("--actors.engine.no_such_argument", "1"),
    )
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("run failed: actor-0: ") and "no_such_argument" in last
    assert last.endswith(f"read {tmp_path / 't' / 'logs' / 'actor-0.log'}")
