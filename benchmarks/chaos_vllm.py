"""The chaos of `benchmarks/chaos.py` on `launch.py` itself: Ray, vLLM (a tiny random model), tools, rewards.

    python benchmarks/chaos_vllm.py [--kills 8] [--seed 0]

Kills actors, buffer, learner and launcher, each at least once; a killed launcher is followed by
`launch.py --resume`. Real actors write down no acks, so "lost" is counted from the store: what stood in it
before a kill must stand in it at the end. The replay is by the learner and the buffer alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos import CALL_S, MAINS, Launched, Result, Run, chaos, judge, replay, table, weights_of
from configs.load import load_config
from configs.run_folder import RunFolder
from tests.integration.runs import command, write_task

SETTINGS = {
    "buffer.keep": "all",  # for the replay
    "buffer.lease_timeout_s": "30",
    "actors.count": "2",
    "actors.max_restarts": "1000",
    "learner.max_restarts": "1000",
    "learner.checkpoint_every": "2",
}


class VllmRun(Launched):
    """A run that a user could have started."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(RunFolder(folder / "chaos"), steps, folder / "terminal.log")
        self._config = write_task(folder)

    def command(self) -> list[str]:
        if self.folder.config.exists():
            return command("--resume", str(self.folder.root))
        settings = SETTINGS | {"learner.steps": str(self.steps)}
        settings |= {"launch.runs_dir": str(self.folder.root.parent), "launch.name": self.folder.root.name}
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return command("--config", str(self._config), *options)

    def roles(self) -> dict[str, int]:
        """Each role writes its process id at the top of its log, again at every start."""
        found = {}
        for log in self.folder.logs.glob("*.log"):
            pids = re.findall(r"^--- .* starts, pid (\d+)$", log.read_text(errors="replace"), re.MULTILINE)
            if pids:
                found[log.stem] = int(pids[-1])
        return found

    def note_acked(self) -> None:
        if not self.folder.store.exists():
            return
        with closing(sqlite3.connect(f"file:{self.folder.store}?mode=ro", uri=True, timeout=CALL_S)) as store:
            stored = [one for (one,) in store.execute("SELECT trajectory_id FROM trajectories")]
        (self.folder.root / "acked.txt").write_text("\n".join(stored))


def measure(folder: Path, kills: int, steps: int, seed: int, deadline_s: float) -> Result:
    run, result, started = VllmRun(folder, steps), Result(), time.monotonic()
    again = None
    try:
        # Each kill waits for some steps, so that all roles have come back: before its first step a role that
        # cannot start ends a run on purpose.
        chaos(run, kills, random.Random(seed), deadline_s, deadline_s, result, progress=(5, 10, 20))
        result.seconds = time.monotonic() - started
        judge(run, result)
        config = load_config(run.folder.config).config
        run_id = json.loads(run.folder.run_info.read_text())["run_id"]
        mains = MAINS | {"learner": "learner.learner:main"}
        again = Run(folder / "replay", config, mains, folder / "model", run_id)
        again.specs = [spec for spec in again.specs if spec.role != "actor"]
        replay(run, again, deadline_s)
        result.weights_equal = weights_of(run) == weights_of(again)
    finally:
        run.kill_all()
        if again is not None:
            again.kill_all()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--steps", type=int, help="default: 24 for each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=3600, help="seconds, of the whole")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps = options.steps or 24 * options.kills
        result = measure(folder, options.kills, steps, options.seed, options.deadline)
    Console().print(table(result))
    sys.exit(0 if result.kept_every_promise else 1)


if __name__ == "__main__":
    main()
