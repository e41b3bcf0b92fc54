"""kill -9 in the middle of a checkpoint, again and again, and what the next learner finds.

    python benchmarks/checkpoint_kills.py [--kills 4] [--seed 0] [--model FOLDER]

A learner process trains and writes a checkpoint after every step. It is killed at a random place within the
writing of the second checkpoint of its life, and another one goes on from what it finds. At the end the
weights must equal, bit by bit, those of a learner that nobody killed. Exits non-zero if they do not.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

DEADLINE_S = 300.0  # of one life


# --- the learner ----------------------------------------------------------------------------------


def say(what: str, step: int) -> None:
    sys.stdout.write(f"{what} {step}\n")  # one write: two threads speak
    sys.stdout.flush()


def learn(model: Path, checkpoints: Path, steps: int) -> None:
    """Train to `steps`, a checkpoint after each; print what happens and, at the end, the weights' hash."""
    from benchmarks.learner_batches import made_up
    from buffer.messages import Batch
    from configs.schema import RunConfig
    from launcher.preflight import free_port
    from learner import checkpoint
    from learner.checkpoint import Progress
    from learner.checkpointer import Checkpointer
    from learner.deepspeed_engine import join_group
    from learner.trainer import Trainer

    join_group(0, 1, f"127.0.0.1:{free_port('127.0.0.1')}", "cpu", 60)
    config = RunConfig.model_validate({"learner": {"logprob_gap_warn": 100}})  # the logprobs are made up
    trainer = Trainer(config, model, rank=0, world=1, device="cpu")
    found = checkpoint.latest(checkpoints)
    progress = checkpoint.restore(trainer, found) if found else Progress()
    say("begins after", progress.step)
    checkpointer = Checkpointer(trainer, checkpoints, keep=1, keep_best=0)
    write = checkpoint.write

    def write_and_say(taken: checkpoint.Snapshot, folder: Path) -> None:
        say("writing", taken.progress.step)
        write(taken, folder)
        say("written", taken.progress.step)

    checkpoint.write = write_and_say

    def batch_of(step: int) -> Batch:
        return replace(made_up(1, 4, shared=0, prompt=40, vocabulary=300, seed=step), step=step)

    for step in range(progress.step + 1, steps + 1):
        trainer.train_step(batch_of(step))
        say("trained", step)
        if (done := checkpointer.start(Progress(step, step), 0.0)) is not None:
            say("complete", done)
    say("complete", checkpointer.finish() or 0)
    digest = hashlib.sha256()
    for _, tensor in trainer.named_weights():
        digest.update(tensor.float().numpy().tobytes())
    print("weights", digest.hexdigest()[:16], flush=True)


# --- who kills it ---------------------------------------------------------------------------------


@dataclass
class Life:
    """What one learner process said, with the seconds since its start, until it ended or was killed."""

    said: list[tuple[float, str, str]]
    found: int = 0  # the step that it began after
    left: float = 0.0  # MiB of the checkpoint in whose writing it was killed

    def at(self, what: str, step: int) -> float:
        return next(t for t, said, number in self.said if (said, number) == (what, str(step)))


def live(model: Path, checkpoints: Path, steps: int, kill_at: float | None = None) -> Life:
    """Run a learner; kill it when this share of the second checkpoint of its life is written."""
    command = [sys.executable, __file__, "--learn", str(model), str(checkpoints), str(steps)]
    life, started = Life([]), time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        for what, number in _lines(process):
            life.said.append((time.monotonic() - started, what, number))
            if what == "begins after":
                life.found = int(number)
            if kill_at is not None and (what, number) == ("writing", str(life.found + 2)):
                life.left = _kill_at(process, checkpoints, life.found + 2, kill_at)
        deadline.cancel()
    if kill_at is None and process.returncode:
        raise SystemExit(f"the learner failed with exit code {process.returncode}")
    return life


def _kill_at(process: subprocess.Popen[str], checkpoints: Path, step: int, share: float) -> float:
    """Kill it once `share` of the checkpoint is on its way to the disk; the MiB that were."""
    partial, whole = checkpoints / f".step-{step}.partial", _mib(checkpoints / f"step-{step - 1}")
    while process.poll() is None and not (checkpoints / f"step-{step}").exists():
        if (written := _mib(partial)) >= share * whole:
            break
        time.sleep(0.002)
    else:
        written = whole
    process.kill()
    return written


def _lines(process: subprocess.Popen[str]) -> Iterator[tuple[str, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        what, _, number = line.strip().rpartition(" ")
        if what in ("begins after", "trained", "writing", "written", "complete", "weights"):
            yield what, number


def measure(model: Path, folder: Path, kills: int, seed: int) -> bool:
    """Print each life; True if the weights at the end are those of a run without kills."""
    steps = kills + 2
    whole = live(model, folder / "whole", steps)
    takes = [whole.at("written", step) - whole.at("writing", step) for step in range(1, steps + 1)]
    print(f"without a kill: {steps} steps, writing a checkpoint takes {min(takes):.2f} to {max(takes):.2f} s")
    chance, killed = random.Random(seed), folder / "killed"
    for number in range(1, kills + 1):
        life = live(model, killed, steps, chance.random())
        left = ", ".join(sorted(f"{p.name} ({_mib(p):.0f} MiB)" for p in killed.iterdir()))
        print(
            f"kill {number}: began after step {life.found}, killed with {life.left:.0f} MiB of checkpoint "
            f"{life.found + 2} written; it left {left}"
        )
    last = live(model, killed, steps)
    ends = [life.said[-1][2] for life in (whole, last)]
    print(f"the last learner began after step {last.found} and trained to step {steps}")
    verdict = "equal" if ends[0] == ends[1] else "DIFFERENT"
    print(f"weights without a kill {ends[0]}, with {kills} kills {ends[1]}: {verdict}")
    return ends[0] == ends[1]


def _mib(folder: Path) -> float:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    except FileNotFoundError:  # it is being renamed
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder or the packaged model")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn", nargs=3, help=argparse.SUPPRESS)  # what a life runs
    options = parser.parse_args()
    if options.learn:
        model, checkpoints, steps = options.learn
        learn(Path(model), Path(checkpoints), int(steps))
        return
    from learner.packaged_model import prepare

    with tempfile.TemporaryDirectory() as folder:
        if not measure(prepare(options.model), Path(folder), options.kills, options.seed):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
