"""Kill -9 any process of a run at random moments, and hold the run to its promises.

    python benchmarks/chaos.py [--kills 100] [--learner vector|real] [--seed 0]

Real processes, sockets, keys, store, supervisor and guards (`benchmarks/chaos_roles.py`); the actors' engine
is a random generator, because its start-up is all that a real one would add. Whenever the launcher is killed,
or gives up, it is started again on the same folder, as `launch.py --resume` would. At the end the same
batches are trained once more, undisturbed, from a copy of the store: the weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from launcher.preflight import free_port

ROOT = Path(__file__).parents[1]
MAINS = {
    "buffer": "buffer.server:main",
    "actor": "benchmarks.chaos_roles:act",
    "learner": "benchmarks.chaos_roles:learn",
}
ACTORS = 2
CALL_S = 60.0


@dataclass
class Result:
    kills: Counter[str] = field(default_factory=Counter)  # by role
    resumes: int = 0  # starts of the launcher after the first
    seconds: float = 0.0
    steps: int = 0
    ledger: str = ""
    balanced: bool = False
    duplicates: int = 0  # trajectories in two batches
    lost: int = 0  # acked, and not in the store
    weights_equal: bool = False

    @property
    def kept_every_promise(self) -> bool:
        return self.balanced and not self.duplicates and not self.lost and self.weights_equal


class Launched:
    """A run whose launcher is a process of ours: watched, started again, and read from outside."""

    def __init__(self, folder: RunFolder, steps: int, log: Path) -> None:
        self.folder, self.steps, self._log = folder, steps, log
        self._launcher: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def command(self) -> list[str]:
        """What starts the launcher, or starts it again."""
        raise NotImplementedError

    def roles(self) -> dict[str, int]:
        """Process ids by role, as they were last written down; some may have ended."""
        raise NotImplementedError

    def note_acked(self) -> None:
        """Called before each kill, for a run whose actors write down no acks themselves."""

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                self.command(),
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1

    def has_finished(self) -> bool:
        """Start the launcher again if it is gone; True when it has trained the last step."""
        assert self._launcher is not None
        code = self._launcher.poll()
        if code is None:
            return False
        if code != 0:
            self.start()
        return code == 0

    def pids(self) -> dict[str, int]:
        """Processes that a kill may hit, by role: the launcher and its descendants, so never a stranger's."""
        assert self._launcher is not None
        try:
            ours = {child.pid for child in psutil.Process(self._launcher.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return {}
        return {"launcher": self._launcher.pid} | {r: pid for r, pid in self.roles().items() if pid in ours}

    def step(self) -> int:
        """The last one committed."""
        if not self.folder.store.exists():
            return 0
        with closing(sqlite3.connect(f"file:{self.folder.store}?mode=ro", uri=True, timeout=CALL_S)) as store:
            try:
                query = "SELECT coalesce(max(step), 0) FROM batches WHERE committed_at NOTNULL"
                return store.execute(query).fetchone()[0]
            except sqlite3.OperationalError:  # the buffer died before it had made its tables
                return 0

    def kill_all(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.kill()  # the guards end the rest
            self._launcher.wait(CALL_S)


class Run(Launched):
    """The supervisor over plain processes of `benchmarks/chaos_roles.py`."""

    def __init__(
        self, folder: Path, config: RunConfig, mains: dict[str, str], model: Path, run_id: str = "chaos"
    ) -> None:
        super().__init__(RunFolder(folder), config.learner.steps, folder / "logs" / "launcher.log")
        for name in ("logs", "pids"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.create_keys()
        self.mains, self.specs = mains, specs(folder, config, model, run_id)

    def command(self) -> list[str]:
        endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"  # a resumed run has a new one too
        chosen = [replace(spec, buffer_endpoint=endpoint) for spec in self.specs]
        self.folder.endpoint.write_text(endpoint + "\n")
        (self.folder.root / "specs.pickle").write_bytes(pickle.dumps((chosen, self.mains)))
        return [sys.executable, "-m", "benchmarks.chaos_roles", str(self.folder.root)]

    def roles(self) -> dict[str, int]:
        return {path.name: int(path.read_text() or 0) for path in (self.folder.root / "pids").iterdir()}


def chaos_config(steps: int, model: Path, actors: int = ACTORS, lease_timeout_s: float = 5) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "actors": {"count": actors, "group_size": 4, "max_restarts": 10**6},
            "buffer": {
                "groups_per_batch": 4,
                "max_staleness": 2,
                "heartbeat_s": 0.2,
                "lease_timeout_s": lease_timeout_s,
                "keep": "all",
            },
            "learner": {"steps": steps, "checkpoint_every": 3, "max_restarts": 10**6, "lr": 1e-3},
        }
    )


def specs(folder: Path, config: RunConfig, model: Path, run_id: str) -> list[RoleSpec]:
    common = RoleSpec(
        role="buffer",
        name="buffer",
        rank=0,
        world=1,
        config=config,
        run_dir=folder,
        run_id=run_id,
        config_dir=folder,
        model_path=model,
        num_prompts=100_000,
        buffer_endpoint="",
        device="cpu",
        threads=1,
    )
    actors = [
        replace(common, role="actor", name=f"actor-{rank}", rank=rank) for rank in range(config.actors.count)
    ]
    return [common, *actors, replace(common, role="learner", name="learner-0")]


def chaos(
    run: Launched,
    kills: int,
    rng: random.Random,
    killing_s: float,
    deadline_s: float,
    result: Result,
    progress: Sequence[int] = (0, 0, 1, 2),
) -> None:
    """Kill until `kills` processes have died or `killing_s` have passed, then let the run finish.

    `progress`: steps before the next kill, drawn from these. With 0 it comes while others start or reconnect.
    """
    until, kill_until = time.monotonic() + deadline_s, time.monotonic() + killing_s
    run.start()
    wanted_step, next_kill = 1, 0.0
    while not run.has_finished():
        if time.monotonic() > until:
            raise TimeoutError(f"the run has not ended after {deadline_s:.0f} s; see {run.folder.logs}")
        if result.kills.total() < kills and next_kill <= time.monotonic() < kill_until:
            if run.step() >= wanted_step and kill_one(run, rng, result):
                wanted_step = run.step() + rng.choice(progress)
                next_kill = time.monotonic() + rng.uniform(0, 0.5)
            elif run.step() + 2 < wanted_step:
                wanted_step = run.step() + 1  # it was resumed from an earlier checkpoint
        time.sleep(0.02)
    result.resumes = run.starts - 1


def kill_one(run: Launched, rng: random.Random, result: Result) -> bool:
    """Any process, but each role once before any role twice."""
    alive = sorted(run.pids().items())
    if not alive:
        return False
    run.note_acked()
    role, pid = rng.choice([one for one in alive if not result.kills[one[0]]] or alive)
    os.kill(pid, signal.SIGKILL)
    result.kills[role] += 1
    return True


def judge(run: Launched, result: Result) -> None:
    """Read the store as it was left."""
    with closing(sqlite3.connect(run.folder.store)) as store:
        trained = store.execute(
            "SELECT step, trajectory_id FROM groups JOIN batches USING (step)"
            " JOIN trajectories USING (group_id) WHERE committed_at NOTNULL AND reward NOTNULL"
        ).fetchall()
        stored = {one for (one,) in store.execute("SELECT trajectory_id FROM trajectories")}
        places = dict(store.execute("SELECT place, count(*) FROM ledger GROUP BY place").fetchall())
        leased = store.execute("SELECT count(*) FROM groups").fetchone()[0]
    acked = set((run.folder.root / "acked.txt").read_text().split())
    result.steps = len({step for step, _ in trained})
    result.duplicates = len(trained) - len({one for _, one in trained})
    result.lost = len(acked - stored)
    result.ledger = f"leased {leased} = " + " + ".join(f"{place} {n}" for place, n in sorted(places.items()))
    settled = all(place == "trained" or place.startswith("dropped_") for place in places)
    result.balanced = leased == sum(places.values()) and settled and result.steps == run.steps


def replay(run: Launched, again: Run, deadline_s: float) -> None:
    """The same batches, undisturbed: a copy of the store, no checkpoint, no prompt left to lease."""
    with (
        closing(sqlite3.connect(run.folder.store)) as source,
        closing(sqlite3.connect(again.folder.store)) as copy,
    ):
        source.backup(copy)
    until = time.monotonic() + deadline_s
    again.start()
    while not again.has_finished():
        if time.monotonic() > until:
            raise TimeoutError(f"the replay has not ended after {deadline_s:.0f} s; see {again.folder.logs}")
        time.sleep(0.05)


def weights_of(run: Launched) -> bytes:
    vector = run.folder.root / "weights.npy"
    return (vector if vector.exists() else run.folder.export / "model.safetensors").read_bytes()


def measure(
    folder: Path, kills: int, steps: int, seed: int, learner: str, deadline_s: float, killing_s: float = inf
) -> Result:
    """The whole experiment in `folder`."""
    mains, model = dict(MAINS), folder / "model"
    if learner == "real":
        from tests.tiny import tiny_model

        mains["learner"] = "learner.learner:main"
        tiny_model(model)
    config = chaos_config(steps, model)
    run, again = (Run(folder / name, config, mains, model) for name in ("chaos", "replay"))
    result, started = Result(), time.monotonic()
    try:
        chaos(run, kills, random.Random(seed), killing_s, deadline_s, result)
        result.seconds = time.monotonic() - started
        judge(run, result)
        replay(run, again, deadline_s)
        result.weights_equal = weights_of(run) == weights_of(again)
    finally:
        run.kill_all()
        again.kill_all()
    return result


def table(result: Result) -> Table:
    shown = Table(
        "chaos", "measured", title=f"{result.kills.total()} processes killed in {result.seconds:.0f} s"
    )
    killed = ", ".join(f"{role} {count}" for role, count in sorted(result.kills.items()))
    for what, value in (
        ("kill -9 by role", killed),
        ("launcher resumed", str(result.resumes)),
        ("steps completed", str(result.steps)),
        ("ledger", result.ledger),
        ("ledger balanced", "yes" if result.balanced else "NO"),
        ("trajectories trained twice", str(result.duplicates)),
        ("acked trajectories lost", str(result.lost)),
        ("weights as undisturbed", "equal, bit for bit" if result.weights_equal else "DIFFERENT"),
    ):
        shown.add_row(what, value)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, help="default: 4 for each kill")
    parser.add_argument("--learner", choices=["vector", "real"], default="vector")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=3600, help="seconds, of the whole")
    parser.add_argument("--seconds", type=float, default=inf, help="kill no more after this time")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    options = parser.parse_args()
    steps = options.steps or 4 * options.kills
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        result = measure(
            folder,
            options.kills,
            steps,
            options.seed,
            options.learner,
            options.deadline,
            options.seconds,
        )
    Console().print(table(result))
    sys.exit(0 if result.kept_every_promise else 1)


if __name__ == "__main__":
    main()
