"""Runs `actors.evaluator` in a process of its own, with the terminal as its output.

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

from launcher.guard import kill_group, start_guard
from launcher.interrupts import Interrupts
from launcher.preflight import REPO, Resources

_TERM_GRACE_S = 5.0


class EvaluationFailed(Exception):
    """The evaluator ended with an error; it has printed its own cause."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate. `overrides` are dotted settings as `--section.key=value`."""

    config: Path
    model: Path
    out: Path
    label: str
    overrides: Sequence[str] = ()


def evaluate(
    what: Evaluation, resources: Resources, interrupts: Interrupts, log: Path | None = None
) -> dict[str, Any] | None:
    """Run the evaluator; its result, or None if a stop was asked for. `log`: where its output goes instead
    of the terminal. Raises EvaluationFailed."""
    command = [
        *(sys.executable, "-m", "actors.evaluator"),
        *("--config", str(what.config), "--model", str(what.model), "--out", str(what.out)),
        *("--label", what.label, "--device", resources.device, "--threads", str(resources.actor_threads)),
        *what.overrides,
    ]
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    output = log.open("ab") if log else None
    try:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(resources.actor_threads)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        guard = start_guard(os.getpid(), [-process.pid])
        try:
            stopped = _wait(process, interrupts)
        finally:
            kill_group(process.pid)
            os.kill(guard, signal.SIGTERM)
    finally:
        if output:
            output.close()
    if stopped:
        return None
    if process.returncode != 0:
        where = f"; read {log}" if log else ""
        raise EvaluationFailed(f"the evaluator ended with exit code {process.returncode}{where}")
    return json.loads(what.out.read_text(encoding="utf-8"))


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
