"""How much of a run's learning overlapped its generation, and who waited for what.

    python benchmarks/overlap.py runs/<name>

Reads metrics.jsonl only. A learner step's report is written when the step ends; an actor's report covers
the window before it. Within a window the time without any trajectory in flight is taken as spread evenly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metrics import names


@dataclass(frozen=True)
class Interval:
    """`share` of the seconds from `start` to `end` (unix time) were busy."""

    start: float
    end: float
    share: float = 1.0

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * self.share


def read_reports(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def training(reports: Iterable[dict]) -> list[Interval]:
    """When learner rank 0 computed forward, backward and optimizer."""
    found = []
    for report in reports:
        metrics = report["metrics"]
        if report["role"] == "learner" and names.TRAIN_S in metrics:
            end = report["time"] - metrics.get(names.PUBLISH_S, 0.0)
            found.append(Interval(end - metrics[names.TRAIN_S], end))
    return found


def generating(reports: Iterable[dict]) -> list[Interval]:
    """When an actor had trajectories in flight and its engine was not paused."""
    found = []
    for report in reports:
        metrics = report["metrics"]
        window = metrics.get(names.ACTOR_WINDOW_S, 0.0)
        if report["role"] == "actor" and window > 0:
            still = metrics.get(names.ACTOR_IDLE_S, 0.0) + metrics.get(names.ACTOR_PAUSED_S, 0.0)
            share = min(1.0, max(0.0, 1.0 - still / window))
            found.append(Interval(report["time"] - window, report["time"], share))
    return found


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds of `first` during which `second` was busy; several actors may add up to more than all."""
    return sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start)) * a.share * b.share for a in first for b in second
    )


def total(reports: Iterable[dict], name: str) -> float:
    return sum(report["metrics"].get(name, 0.0) for report in reports)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    run = parser.parse_args(arguments).run
    reports = read_reports(run)
    train, generate = training(reports), generating(reports)
    if not train or not generate:
        sys.exit(f"{run}/metrics.jsonl holds no learner step or no actor window: let the run train first")
    actors = len({report["name"] for report in reports if report["role"] == "actor"})
    train_s = sum(interval.seconds for interval in train)
    window_s = total(reports, names.ACTOR_WINDOW_S)

    table = Table(title=f"{run.name}: who waited for what")
    for column in ("role", "what", "seconds", "share"):
        table.add_column(column, justify="left" if column in ("role", "what") else "right")
    step_s = total(reports, names.STEP_S)
    for what, name in (
        ("all steps", names.STEP_S),
        ("waiting for a batch", names.WAIT_S),
        ("forward, backward, optimizer", names.TRAIN_S),
        ("copying weights for publishing", names.PUBLISH_S),
    ):
        seconds = total(reports, name)
        table.add_row("learner", what, f"{seconds:.1f}", f"{seconds / step_s:.1%}")
    for what, seconds in (
        (f"alive, {actors} actor(s)", window_s),
        ("generating or in tools", sum(interval.seconds for interval in generate)),
        ("no lease: waiting for the learner", total(reports, names.ACTOR_IDLE_S)),
        ("engine paused for new weights", total(reports, names.ACTOR_PAUSED_S)),
    ):
        table.add_row("actors", what, f"{seconds:.1f}", f"{seconds / window_s:.1%}")
    shared = overlap(train, generate) / actors
    table.add_row(
        "both", "training while actors generated", f"{shared:.1f}", f"{shared / train_s:.1%} of training"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
