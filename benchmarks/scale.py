"""Scale a live run up and down by `launch.py scale`, and measure its throughput before, during and after.

    python benchmarks/scale.py --run runs/x [--to 3,1] [--seconds 60]
    python benchmarks/scale.py [--to 3,1]           # a run of its own, with a stand-in for the engine

Throughput is counted from the store: trajectories and sampled tokens put in a window. "during" is from the
command to its return. The stand-in's episodes last a second of waiting, so an actor's throughput does not
depend on how many cores there are; everything else is Slipstream's own (`benchmarks/chaos_roles.py`).
"""

from __future__ import annotations

import argparse
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos import MAINS, Run, chaos_config
from configs.load import dump_toml
from configs.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
START_S = 600.0
FOREVER = 10**6  # steps


def throughput(run: Path, since: float, until: float) -> tuple[float, float]:
    """(trajectories, sampled tokens) put per second between two unix times."""
    query = "SELECT count(*), coalesce(sum(action_tokens), 0) FROM trajectories WHERE put_at BETWEEN ? AND ?"
    with closing(sqlite3.connect(f"file:{RunFolder(run).store}?mode=ro", uri=True, timeout=60)) as store:
        count, tokens = store.execute(query, (since, until)).fetchone()
    return count / (until - since), tokens / (until - since)


def record(run: Path, numbers: list[int], seconds: float, table: Table) -> None:
    """Measure, scale, measure again, for each number of actors."""
    _measure(run, "before", seconds, table)
    for actors in numbers:
        started = time.time()
        command = [sys.executable, "launch.py", "scale", "--run", str(run), "--actors", str(actors)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
        _row(run, f"scaling to {actors}", started, time.time(), table)
        print(done.stdout.strip() or done.stderr.strip(), flush=True)
        if done.returncode:
            sys.exit("the run could not be scaled")
        _measure(run, f"with {actors}", seconds, table)


def _measure(run: Path, phase: str, seconds: float, table: Table) -> None:
    started = time.time()
    time.sleep(seconds)
    _row(run, phase, started, time.time(), table)


def _row(run: Path, phase: str, since: float, until: float, table: Table) -> None:
    trajectories, tokens = throughput(run, since, until)
    table.add_row(phase, f"{until - since:.0f}", f"{trajectories:.1f}", f"{tokens:,.0f}")


@contextmanager
def stand_in_run() -> Iterator[Path]:
    """A live run of one actor, ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        mains = MAINS | {"actor": "benchmarks.chaos_roles:act_slowly"}
        config = chaos_config(FOREVER, Path(folder), actors=1, lease_timeout_s=120)
        run = Run(Path(folder), config, mains, Path(folder))
        run.folder.config.write_text(dump_toml(config))
        run.folder.run_info.write_text('{"run_id": "chaos", "config_dir": "."}')
        run.start()
        try:
            until = time.monotonic() + START_S
            while run.step() < 2:
                if run.has_finished() or time.monotonic() > until:
                    sys.exit(f"the run has not begun; see {run.folder.logs}")
                time.sleep(0.1)
            yield Path(folder)
        finally:
            run.kill_all()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run that goes on")
    parser.add_argument("--to", default="3,1", help="numbers of actors, one after the other")
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    options = parser.parse_args()
    numbers = [int(number) for number in options.to.split(",")]
    table = Table("phase", "seconds", "trajectories/s", "sampled tokens/s")
    try:
        if options.run is not None:
            record(options.run, numbers, options.seconds, table)
        else:
            with stand_in_run() as run:
                record(run, numbers, options.seconds, table)
    finally:
        Console().print(table)


if __name__ == "__main__":
    main()
