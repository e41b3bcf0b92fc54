"""A training run from its checks to its last line on the screen. Called by `launcher.commands`.

Invariant: whatever happens, the roles are gone when this returns, and the last line says how the run
ended: its result, how to resume it, or the first cause of a failure and the file to read.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import AbstractContextManager, closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.load import LoadedConfig
from configs.run_folder import RunFolder
from launcher.buffer_link import BufferLink
from launcher.display import Display
from launcher.evaluation import Evaluation, evaluate
from launcher.interfaces import End, Event, Outcome
from launcher.interrupts import EXIT_STOPPED, Interrupts
from launcher.judge_server import JudgeServer, judge_server
from launcher.preflight import run_lock
from launcher.prepare import Run, prepare_run
from launcher.progress import before_after, measured
from launcher.run_view import RunView
from launcher.supervisor import Supervisor
from metrics.sinks import open_sinks
from tasks.mixture import Part

_TICK_S = 0.5
_LOG_TAIL = 15  # lines of a failed role's log on the screen
EXIT_FAILED = 1


def train(loaded: LoadedConfig, folder: RunFolder, console: Console) -> int:
    """Train in `folder`, new or to be resumed; the exit code. Raises PreflightError, EvaluationFailed."""
    with run_lock(folder):
        run = prepare_run(loaded, folder)
        _introduce(run, console)
        with Interrupts() as interrupts, _judge(run, interrupts, console) as judge:
            before = _measure(run, "before", run.model_path, interrupts, console)
            if interrupts.requested:
                return say_stopped(run, "stopped before the first step", console)
            outcome = _supervise(run, interrupts, console, judge)
            if outcome.end is End.FAILED:
                return say_failed(run, outcome, console)
            if outcome.end is End.STOPPED:
                return say_stopped(run, outcome.message, console)
            after = _measure(run, "after", folder.export, interrupts, console)
        if before and after:
            console.print(before_after(before, after))
        console.print(f"done: {outcome.message}", highlight=False, soft_wrap=True)
        console.print(f"model: {folder.export}", highlight=False, soft_wrap=True)
        return 0


def _introduce(run: Run, console: Console) -> None:
    lines = {
        "run": f"{run.folder.root} (config.toml, metrics.jsonl, logs/)",
        "machine": run.resources.words,
        "model": str(run.model_path),
        "task": "; ".join(in_words(part, len(run.mixture.parts) > 1) for part in run.mixture.parts),
    }
    lines |= {"calls": "; ".join(dict.fromkeys(run.syntaxes))} if run.syntaxes else {}
    lines |= {"note": text} if (text := notes(run)) else {}
    if run.config.sft.data:
        lines["learns"] = f"{run.demonstrations} demonstrations of {run.config.sft.data}"
    for label, text in lines.items():
        console.print(f"{label:<8} {text}", highlight=False, markup=False, soft_wrap=True)


def in_words(part: Part, mixed: bool = False) -> str:
    """A task in one line."""
    task, tools = part.task, ", ".join(tool.name for tool in part.task.tools)
    if task.offered is not None:
        tools = "each row offers its own tools"
    text = f"{task.name}: {len(task.train)} training and {len(task.held_out)} held-out prompts; {tools}"
    return f"{text}; weight {part.weight:g}, {part.share} prompts an epoch" if mixed else text


def notes(run: Run) -> str:
    """What a user should know of the data before it is trained on."""
    said = []
    for part, dropped in zip(run.mixture.parts, run.dropped_prompts, strict=False):
        if dropped:
            said.append(
                f"{len(dropped)} training prompts of {part.task.name} left out: they leave no room to answer "
                f"within task.max_trajectory_tokens = {part.limits.max_trajectory_tokens}"
            )
    prompts, groups = len(run.mixture), run.config.buffer.groups_per_batch
    if prompts < groups:
        said.append(
            f"a step takes {groups} groups but there are {prompts} training prompts, so a step repeats"
            " some; lower buffer.groups_per_batch or give more rows"
        )
    if run.config.eval.before_and_after and not run.mixture.held_out(1):
        said.append("no held-out rows (task.held_out), so success is not measured before and after")
    return "; ".join(said)


def _measure(
    run: Run, label: str, model: Path, interrupts: Interrupts, console: Console
) -> dict[str, Any] | None:
    """Held-out success of a model folder, if the config asks for it; measured once for a run folder."""
    out = run.folder.eval / f"{label}.json"
    if not run.config.eval.before_and_after or interrupts.requested or not run.mixture.held_out(1):
        return None
    if label == "before" and out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    if label == "after":  # of weights that have been trained further since
        for old in (out, out.with_suffix(".jsonl")):
            old.unlink(missing_ok=True)
    prompts = len(run.mixture.held_out(run.config.eval.prompts))
    text = f"measuring success {label} training on {prompts} held-out prompts"
    what = Evaluation(run.folder.config, str(model), out, label)
    log = run.folder.logs / f"eval-{label}.log"
    if not console.is_terminal:
        console.print(text, highlight=False)
    with console.status(text):
        result = evaluate(what, run.resources, interrupts, log)
    if result is not None:
        console.print(measured(label, result), highlight=False)
    return result


def _judge(run: Run, interrupts: Interrupts, console: Console) -> AbstractContextManager[JudgeServer | None]:
    log = run.folder.logs / "judge.log"
    return judge_server(run.config, run.resources, log, console, interrupts)


def _supervise(
    run: Run, interrupts: Interrupts, console: Console, judge: JudgeServer | None = None
) -> Outcome:
    """Start the roles and look after them until the run has ended. Libraries' output goes to a log."""
    from launcher.ray_roles import RayRoles, cluster

    folder = run.folder
    sinks = open_sinks(
        run.config.launch.sinks, folder.root, folder.metrics, run.config.model_dump(mode="json")
    )
    display = Display(console, RunView.of(run.config, folder.root.name), folder, sinks)
    log = (folder.logs / "launcher.log").open("a", encoding="utf-8", buffering=1)
    with (
        display.shown(),
        log,
        redirect_stdout(log),
        redirect_stderr(log),
        cluster(run.config, folder.root, run.resources.gpus),
        closing(BufferLink(run.endpoint, run.keys)) as buffer,
    ):
        interrupts.install()  # Ray has taken SIGTERM
        roles = RayRoles(run.config, run.resources.device)
        supervisor = Supervisor(
            run.specs(), roles, buffer, run.config, time.monotonic, display.event, display.status
        )
        return _watch(supervisor, interrupts, judge, display)


def _watch(
    supervisor: Supervisor, interrupts: Interrupts, judge: JudgeServer | None, display: Display
) -> Outcome:
    try:
        while supervisor.tick():
            if judge is not None:
                _look_at_judge(judge, supervisor, display)
            if interrupts.requested:
                supervisor.stop()
            time.sleep(_TICK_S)
    finally:
        supervisor.close()
    assert supervisor.outcome is not None
    return supervisor.outcome


def _look_at_judge(judge: JudgeServer, supervisor: Supervisor, display: Display) -> None:
    while not judge.events.empty():
        display.event(Event("restart", "judge", judge.events.get()))
    if judge.failure:
        supervisor.fail("judge", judge.failure)


def say_failed(run: Run, outcome: Outcome, console: Console) -> int:
    """The end of the log in question, then the first cause as the last line."""
    text = f"run failed: {outcome.message}"
    if outcome.role is not None:
        log = run.folder.logs / f"{outcome.role}.log"
        if log.exists():
            with log.open(encoding="utf-8", errors="replace") as lines:
                tail = deque(lines, maxlen=_LOG_TAIL)
            console.print(f"--- the end of {log}", style="dim", highlight=False)
            console.print("".join(tail).rstrip(), highlight=False, markup=False, soft_wrap=True)
            text += f"; read {log}"
    console.print(text, style="bold red", highlight=False, markup=False, soft_wrap=True)
    return EXIT_FAILED


def say_stopped(run: Run, message: str, console: Console) -> int:
    command = f"python launch.py --resume {run.folder.root}"
    console.print(f"{message}; go on with: {command}", highlight=False, markup=False, soft_wrap=True)
    return EXIT_STOPPED
