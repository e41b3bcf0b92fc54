"""A picture of a run: who generated, paused, waited for tools and learned, and which weights were where.

    python benchmarks/timeline.py runs/<name> [--out timeline.png] [--from 60] [--seconds 120]

Reads the run folder only (metrics.jsonl and the buffer's database), of a finished or a running run. Tool
calls are drawn from the trajectories that the buffer still holds: `--buffer.keep all` keeps them all.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).parents[1]))

from buffer.codec import decode_trajectory
from metrics import names

Span = tuple[float, float]  # unix seconds

GENERATING, RECEIVING, PAUSED = "#b8d4ec", "#f2b134", "#c0392b"
WAITING, TRAINING, PUBLISHING = "#dddddd", "#4c8c4a", "#f2b134"


@dataclass
class Swap:
    """New weights in an engine."""

    received: Span
    paused: Span
    version: int


@dataclass
class Engine:
    episodes: list[Span] = field(default_factory=list)  # from the lease to the put
    swaps: list[Swap] = field(default_factory=list)


@dataclass
class Step:
    number: int
    waited: Span
    trained: Span
    published: Span


@dataclass
class Timeline:
    engines: dict[str, Engine]  # by actor
    tools: list[Span]
    steps: list[Step]


# --- reading --------------------------------------------------------------------------------------------


def read(run: Path) -> Timeline:
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with closing(sqlite3.connect(f"file:{run / 'buffer.sqlite'}?mode=ro", uri=True)) as store:
        engines: dict[str, Engine] = {}
        for actor, granted, put in store.execute(
            "SELECT t.actor, l.granted_at, t.put_at FROM trajectories t JOIN leases l USING (lease_id)"
        ):
            engines.setdefault(actor, Engine()).episodes.append((granted, put))
        payloads = store.execute("SELECT payload FROM trajectories WHERE payload IS NOT NULL")
        tools = [span for (payload,) in payloads for span in tool_spans(payload)]
    for name, swaps in read_swaps(reports).items():
        engines.setdefault(name, Engine()).swaps = swaps
    return Timeline(dict(sorted(engines.items())), tools, read_steps(reports))


def tool_spans(payload: bytes) -> list[Span]:
    turns = decode_trajectory(payload).turns
    return [(call["started"], call["ended"]) for turn in turns for call in turn.calls]


def read_swaps(reports: Iterable[dict[str, Any]]) -> dict[str, list[Swap]]:
    """An actor's report keeps its last swap until the next."""
    found: dict[str, list[Swap]] = {}
    for report in reports:
        metrics = report["metrics"]
        ended = metrics.get(names.SYNC_SWAPPED_AT)
        swaps = found.setdefault(report["name"], []) if report["role"] == "actor" else []
        if ended is None or (swaps and swaps[-1].paused[1] == ended):
            continue
        began = ended - metrics[names.SYNC_PAUSE_S]
        received = (began - metrics[names.SYNC_TRANSFER_S], began)
        swaps.append(Swap(received, (began, ended), int(metrics[names.SYNC_VERSION])))
    return found


def read_steps(reports: Iterable[dict[str, Any]]) -> list[Step]:
    """A step's report is written when the step ends, and names the seconds of its parts, in this order."""
    steps = []
    for report in reports:
        metrics = report["metrics"]
        if report["role"] != "learner" or names.TRAIN_S not in metrics:
            continue
        published = report["time"] - metrics.get(names.PUBLISH_S, 0.0), report["time"]
        trained = published[0] - metrics[names.TRAIN_S], published[0]
        waited = trained[0] - metrics.get(names.WAIT_S, 0.0), trained[0]
        steps.append(Step(int(metrics[names.STEP]), waited, trained, published))
    return steps


def in_flight(spans: Sequence[Span]) -> tuple[list[float], list[int]]:
    """Times and, from each on, how many spans are open."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, open_now = [], [], 0
    for time, change in changes:
        open_now += change
        times.append(time)
        counts.append(open_now)
    return times, counts


# --- drawing --------------------------------------------------------------------------------------------


def draw(timeline: Timeline, title: str, window: Span, out: Path) -> None:
    rows = len(timeline.engines) + 2
    figure, axes = pyplot.subplots(
        rows, 1, sharex=True, figsize=(14, 1.2 + 1.5 * rows), layout="constrained", squeeze=False
    )
    origin = window[0]
    *engines, tools, learner = axes[:, 0]
    for axis, (name, engine) in zip(engines, timeline.engines.items(), strict=True):
        draw_engine(axis, name, engine, origin)
    draw_counts(tools, timeline.tools, origin, "#8e6bbf", "tool calls\nin flight")
    draw_learner(learner, timeline.steps, origin)
    learner.set_xlim(0, window[1] - origin)
    learner.set_xlabel("seconds")
    figure.suptitle(title)
    figure.savefig(out, dpi=110)


def draw_counts(axis: Any, spans: Sequence[Span], origin: float, colour: str, label: str) -> None:
    times, counts = in_flight(spans)
    axis.fill_between([t - origin for t in times], counts, step="post", color=colour, linewidth=0)
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)


def draw_engine(axis: Any, name: str, engine: Engine, origin: float) -> None:
    draw_counts(axis, engine.episodes, origin, GENERATING, f"{name}\nin flight")
    for swap in engine.swaps:
        axis.axvspan(*(t - origin for t in swap.received), ymax=0.12, color=RECEIVING, linewidth=0)
        axis.axvspan(*(t - origin for t in swap.paused), color=PAUSED, linewidth=0)
        axis.annotate(
            f"v{swap.version}",
            (swap.paused[1] - origin, 1),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            va="top",
        )
    legend(axis, {"episodes": GENERATING, "receiving": RECEIVING, "paused to load": PAUSED})


def draw_learner(axis: Any, steps: Sequence[Step], origin: float) -> None:
    for spans, colour in (
        ([step.waited for step in steps], WAITING),
        ([step.trained for step in steps], TRAINING),
        ([step.published for step in steps], PUBLISHING),
    ):
        axis.broken_barh([(start - origin, end - start) for start, end in spans], (0, 1), color=colour)
    for step in steps:
        axis.text(step.trained[0] - origin, 0.5, f" {step.number}", fontsize=7, va="center", clip_on=True)
    axis.set_yticks([])
    axis.set_ylabel("learner\nsteps")
    legend(axis, {"waiting for a batch": WAITING, "training": TRAINING, "publishing": PUBLISHING})


def legend(axis: Any, colours: dict[str, str]) -> None:
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axis.legend(patches, list(colours), loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    parser.add_argument("--from", type=float, default=0.0, dest="start", help="seconds after the first lease")
    parser.add_argument("--seconds", type=float, help="how much to draw; everything if left out")
    options = parser.parse_args(arguments)
    timeline = read(options.run)
    episodes = [span for engine in timeline.engines.values() for span in engine.episodes]
    if not episodes:
        sys.exit(f"{options.run}/buffer.sqlite holds no trajectory yet: let the run go on for a while")
    start = min(start for start, _ in episodes) + options.start
    last = max([end for _, end in episodes] + [step.published[1] for step in timeline.steps])
    end = last if options.seconds is None else start + options.seconds
    draw(timeline, options.run.name, (start, end), options.out)
    print(f"{options.out}: {end - start:.0f} s of {options.run.name}")


if __name__ == "__main__":
    main()
