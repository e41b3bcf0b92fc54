"""Where reports go: a JSON-lines file, TensorBoard, Weights & Biases.

Invariant: a sink that was opened takes every report of the run in order. A library that is not
installed is refused by `missing_library` before the run starts. Used by `launcher`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb"}


@dataclass(frozen=True)
class Report:
    """What one role said in one heartbeat. `step`: the run's last committed step at that time."""

    time: float  # unix seconds
    step: int
    role: str
    name: str
    metrics: dict[str, float]


class Sink(Protocol):
    def write(self, report: Report) -> None: ...

    def close(self) -> None: ...


def missing_library(sinks: Sequence[str]) -> str | None:
    """One sentence about the first sink whose library is not installed, or None."""
    for sink in sinks:
        library = _LIBRARIES.get(sink)
        if library is not None and importlib.util.find_spec(library) is None:
            return (
                f"launch.sinks names {sink}, which is not installed; `pip install {library}` or take it out"
            )
    return None


def open_sinks(sinks: Sequence[str], run_dir: Path, metrics_file: Path, config: dict[str, Any]) -> list[Sink]:
    """Open the named sinks for a run. `config` is shown beside the curves where the sink can."""
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: JsonLines(metrics_file),
        "tensorboard": lambda: TensorBoard(run_dir / "tensorboard"),
        "wandb": lambda: Wandb(run_dir, config),
    }
    return [makers[sink]() for sink in sinks]


class JsonLines:
    """One line per report; appended, so that a resumed run goes on in the same file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, report: Report) -> None:
        line = {
            "time": round(report.time, 3),
            "step": report.step,
            "role": report.role,
            "name": report.name,
            "metrics": report.metrics,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files with one curve per role and metric, over steps. Needs `tensorboard`, not torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import (  # pyright: ignore[reportMissingImports] - optional
            event_pb2,
            summary_pb2,
        )
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, report: Report) -> None:
        values = [
            self._summary.Value(tag=f"{report.name}/{metric}", simple_value=value)
            for metric, value in report.metrics.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=report.time, step=report.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One wandb run per run folder. Its own environment variables (WANDB_PROJECT, WANDB_MODE) hold."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - optional

        self._run = wandb.init(
            dir=str(run_dir),
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True),
        )

    def write(self, report: Report) -> None:
        values = {f"{report.name}/{metric}": value for metric, value in report.metrics.items()}
        self._run.log(values | {"step": report.step})

    def close(self) -> None:
        self._run.finish()
