"""Runs `actors.evaluator` in a process of its own.

Invariant: the evaluator and its engine end with the launcher, or earlier when a stop is asked for.
Used by `launch.py eval` and, before and after training, by `launcher.train`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.guard import kill_group, start_guarded, stop_guard
from launcher.interrupts import Interrupts
from launcher.preflight import Resources, python_path

_TERM_GRACE_S = 5.0


class EvaluationFailed(Exception):
    """The evaluator ended with an error; the message ends its log."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate. `overrides` are dotted settings as `--section.key=value`."""

    config: Path
    model: str  # a prepared folder or an endpoint's URL
    out: Path  # .json; the samples go beside it as .jsonl
    label: str
    overrides: Sequence[str] = ()  # dotted settings, as on the command line
    against: Path | None = None  # another evaluation's .jsonl


def evaluate(
    what: Evaluation, resources: Resources, interrupts: Interrupts, log: Path
) -> dict[str, Any] | None:
    """Run the evaluator, its output in `log`; its result, or None if a stop was asked for.

    Raises EvaluationFailed.
    """
    command = [
        *(sys.executable, "-m", "actors.evaluator"),
        *("--config", str(what.config), "--model", what.model, "--out", str(what.out)),
        *("--label", what.label, "--device", resources.device, "--threads", str(resources.actor_threads)),
        *(("--against", str(what.against)) if what.against else ()),
        *what.overrides,
    ]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": str(resources.actor_threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process, guard = start_guarded(command, environment, output)
    try:
        stopped = _wait(process, interrupts)
    finally:
        kill_group(process.pid)
        stop_guard(guard)
    if stopped:
        return None
    if process.returncode != 0:
        raise EvaluationFailed(f"the evaluation failed: {_last_line(log)}; read {log}")
    return json.loads(what.out.read_text(encoding="utf-8"))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _wait(process: subprocess.Popen[bytes], interrupts: Interrupts) -> bool:
    """Until the process ends; True if it was ended because a stop was asked for."""
    while process.poll() is None:
        if interrupts.requested:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_TERM_GRACE_S)
            except subprocess.TimeoutExpired:
                kill_group(process.pid)
                process.wait(_TERM_GRACE_S)
            return True
        time.sleep(0.2)
    return False
