"""What reaches the terminal and the run folder."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from buffer.messages import RoleStatus, StatusReply
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from launcher.display import Display
from launcher.interfaces import End, Event, Outcome
from launcher.interrupts import EXIT_STOPPED
from launcher.prepare import Run
from launcher.run_view import RunView
from launcher.train import EXIT_FAILED, say_failed, say_stopped
from metrics import names
from metrics.sinks import open_sinks


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def display(folder, console):
    sinks = open_sinks(["jsonl"], folder.root, folder.metrics, {})
    return Display(console, RunView.of(RunConfig(), "x"), folder, sinks)


def console(terminal=False):
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)


def status(step, **more):
    told = {names.STEP: step, names.REWARD_MEAN: 0.5} | more
    report = (step, "learner", "learner-0", 1000.0, told)
    return StatusReply("r", step, step, (), {"ready": 1}, True, (report,))


def test_without_a_terminal_each_step_is_one_line(folder):
    out = console()
    shown = display(folder, out)
    with shown.shown():
        shown.event(Event("restart", "actor-0", "actor-0 died (killed)"))
        shown.status(status(1))
        shown.status(status(2))
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("actor-0 died (killed)")
    assert lines[1].startswith("step 1/100  reward 0.500") and lines[2].startswith("step 2/100")
    assert "\x1b" not in out.file.getvalue()


def test_an_evaluation_is_one_line_an_event_and_a_report(folder):
    out = console()
    shown = display(folder, out)
    found = {
        **{names.EVAL_STEP: 10, names.EVAL_VERSION: 10, names.EVAL_VERSION_MAX: 11, names.EVAL_PROMPTS: 63},
        **{names.EVAL_SUCCESS: 0.5, names.EVAL_LOW: 0.38, names.EVAL_HIGH: 0.62, names.EVAL_UNSCORED: 1},
    }
    with shown.shown():
        shown.status(StatusReply("r", 11, 11, (), {}, True, ((1, "eval", "eval", 1000.0, found),)))
    text = (
        "held out, step 10, v10, sampled by up to v11: greedy success 50.0% (38.0% – 62.0%) of 63 prompts, "
        "1 unscored"
    )
    assert out.file.getvalue().endswith(f"{text}\n")
    assert json.loads(folder.events.read_text())["text"] == text
    assert json.loads(folder.metrics.read_text())["metrics"][names.EVAL_SUCCESS] == 0.5


def test_what_a_learner_should_not_do_is_said_when_it_begins(folder):
    out = console()
    shown = display(folder, out)
    apart = {names.DISAGREE: 1.0, names.LOGPROB_GAP_MEAN: 0.41}
    with shown.shown():
        shown.status(status(1, **apart))
        shown.status(status(2, **apart))
        shown.status(status(3, **{names.DISAGREE: 0.0, names.SKIPPED_STEPS: 1.0}))
    said = [line for line in out.file.getvalue().splitlines() if not line.startswith("step")]
    assert len(said) == 2
    assert "engine and learner disagree: the mean gap of their logprobs is 0.41" in said[0]
    assert "learner-0 skipped an update" in said[1]


def test_events_and_reports_are_in_the_run_folder(folder):
    shown = display(folder, console())
    with shown.shown():
        shown.event(Event("restart", "actor-0", "actor-0 died (killed)"))
        shown.status(status(1))
    (event,) = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert (event["event"], event["role"], event["text"]) == ("restart", "actor-0", "actor-0 died (killed)")
    (report,) = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert report["step"] == 1 and report["metrics"][names.REWARD_MEAN] == 0.5


def test_on_a_terminal_the_picture_is_drawn_again_and_events_stay_above_it(folder):
    out = console(terminal=True)
    shown = display(folder, out)
    with shown.shown():
        shown.event(Event("restart", "actor-0", "actor-0 died (killed)"))
        shown.status(status(1))
    text = out.file.getvalue()
    assert "1/100" in text and "step 1/100" not in text
    assert text.count("╭") >= 3 and "actor-0 died (killed)" in text


@pytest.fixture
def run(folder):
    return Run(folder, RunConfig(), folder.root, "r", None, None, None, "", None)  # type: ignore[arg-type]


def test_m7_the_first_cause_is_the_last_line_after_the_end_of_its_log(run, folder):
    (folder.logs / "actor-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    out = console()
    assert say_failed(run, Outcome(End.FAILED, "actor-0: ValueError: boo", "actor-0"), out) == EXIT_FAILED
    lines = out.file.getvalue().splitlines()
    assert lines[-2] == "line 99" and "line 80" not in lines
    assert lines[-1] == f"run failed: actor-0: ValueError: boo; read {folder.logs / 'actor-0.log'}"


def test_a_stopped_run_says_how_to_go_on(run, folder):
    out = console()
    assert say_stopped(run, "stopped after step 3 of 60", out) == EXIT_STOPPED
    assert f"go on with: python launch.py --resume {folder.root}" in out.file.getvalue()


def test_a_role_that_holds_still_says_why_in_one_line_and_when_it_goes_on(folder):
    out = console()
    shown = display(folder, out)
    why = "paused: search is unavailable (refused)"
    with shown.shown():
        for state in ("running", why, why, "running", "running"):
            role = RoleStatus("actor", "actor-0", state, 0, 0, 0.1)
            shown.status(replace(status(1), roles=(role,), reports=()))
    lines = [line[9:] for line in out.file.getvalue().splitlines()]
    assert lines == [f"actor-0 {why}", "actor-0 goes on"]
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [(event["event"], event["role"]) for event in events] == [
        ("pause", "actor-0"),
        ("resume", "actor-0"),
    ]
