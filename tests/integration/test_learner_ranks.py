"""Real learner processes over gloo: ZeRO stages and numbers of ranks give one loss curve, and resume."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240

# argv: rank, world, port, model folder, settings as JSON, and folders to save to and resume from (or "")
RANK = """
import json, sys
from pathlib import Path
from learner import checkpoint
from learner.checkpoint import Progress
from learner.checkpointer import Checkpointer
from learner.deepspeed_engine import join_group
from learner.trainer import Trainer
from tests.unit.learner.support import poisoned, random_batch, run_config

rank, world, port, model, settings, save_to, resume_from = sys.argv[1:]
rank, world = int(rank), int(world)
join_group(rank, world, f"127.0.0.1:{port}", "cpu", timeout_s=120)
settings = json.loads(settings)
nan_in = settings.pop("nan_in", 0)
config = run_config(**({"lr": 3e-3, "warmup_steps": 0} | settings))
trainer = Trainer(config, Path(model), rank=rank, world=world, device="cpu")
first = 1
if resume_from:
    first = checkpoint.restore(trainer, checkpoint.latest(Path(resume_from))).step + 1
curve = []
for step in range(first, first + 3):
    batch = random_batch(groups=5, members=4, seed=step, step=step)
    metrics = trainer.train_step(poisoned(batch) if step == nan_in else batch)
    curve.append([metrics[f"learner/{k}"] for k in ("loss", "grad_norm", "logprob_gap_max", "skipped_steps")])
    if save_to and step == 1:
        checkpointer = Checkpointer(trainer, Path(save_to), keep=1, keep_best=0)
        checkpointer.start(Progress(step, step), score=0.0)
        assert checkpointer.finish() == 1
        checkpointer.close()
total = sum(float(tensor.double().abs().sum()) for _, tensor in trainer.named_weights())
if rank == 0:
    print(json.dumps([curve, total]))
"""


def run(model: Path, world: int, save_to: Path | None = None, resume_from: Path | None = None, **settings):
    """Three steps on `world` ranks: ([loss, gradient norm, largest gap, skips] by step, sum of |weights|)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    tail = [str(port), str(model), json.dumps(settings), str(save_to or ""), str(resume_from or "")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), *tail],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), outputs[0][1][-2000:] + outputs[-1][1][-2000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.slow
def test_stages_and_ranks_give_the_same_curve(tmp_path):
    model = tiny_model(tmp_path / "model")
    curve, total = run(model, world=1)
    for world, stage, budget in ((2, 0, 4096), (2, 1, 60), (2, 2, 60), (2, 3, 60), (1, 3, 4096)):
        other, other_total = run(model, world, zero_stage=stage, tokens_per_microbatch=budget)
        for got, wanted in zip(other, curve, strict=True):
            assert got == pytest.approx(wanted, rel=2e-3, abs=2e-5), (world, stage)
        assert other_total == pytest.approx(total, rel=1e-4), (world, stage)


@pytest.mark.slow
def test_stages_and_ranks_give_the_same_curve_in_bfloat16(tmp_path):
    """Where ZeRO 0 is DeepSpeed's own (in float32 it is computed by stage 1): to bfloat16's rounding."""
    model = tiny_model(tmp_path / "model")
    curve, total = run(model, world=1, dtype="bfloat16")
    for world, stage in ((2, 0), (2, 3), (1, 2)):
        other, other_total = run(model, world, dtype="bfloat16", zero_stage=stage)
        for got, wanted in zip(other, curve, strict=True):
            assert got[:2] == pytest.approx(wanted[:2], rel=3e-2, abs=3e-3), (world, stage)
        assert other_total == pytest.approx(total, rel=1e-3), (world, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_on_one_rank_skips_the_update_on_all(tmp_path, stage, dtype):
    """The second of three steps has one token without a number, on one of the two ranks."""
    model = tiny_model(tmp_path / "model")
    settings = {"zero_stage": stage, "dtype": dtype, "rollout_is": "none", "tokens_per_microbatch": 60}
    curve, total = run(model, world=2, nan_in=2, **settings)
    assert [skipped for *_, skipped in curve] == [0, 1, 0]
    assert total == total  # no NaN got into the weights


@pytest.mark.slow
def test_m9_any_number_of_learners_and_any_stage_resumes(tmp_path):
    model = tiny_model(tmp_path / "model")
    for wrote, stage, readers in ((2, 3, ((1, 2), (2, 0))), (1, 0, ((2, 3),))):
        folder = tmp_path / f"by-{wrote}"
        curve, _ = run(model, world=wrote, save_to=folder, zero_stage=stage)
        for world, other in readers:
            resumed, _ = run(model, world=world, resume_from=folder, zero_stage=other)
            for got, wanted in zip(resumed[:2], curve[1:], strict=True):
                assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5), (wrote, world, other)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_advantages_from_the_model_are_the_same_on_two_ranks(tmp_path, estimator):
    """A group's members lie on different ranks, and what each computed must reach the other."""
    model = tiny_model(tmp_path / "model")
    settings = {"adv_estimator": estimator, "use_kl_in_reward": True, "kl_coef": 0.1, "minibatches": 2}
    curve, total = run(model, world=1, **settings)
    other, other_total = run(model, world=2, tokens_per_microbatch=60, **settings)
    for got, wanted in zip(other, curve, strict=True):
        assert got == pytest.approx(wanted, rel=5e-3, abs=5e-5)
    assert other_total == pytest.approx(total, rel=1e-3)


# argv: port, model folder, checkpoints. Says when the second checkpoint is half written, then hangs in it.
KILLED = """
import sys, threading
from pathlib import Path
from learner import checkpoint
from learner.checkpoint import Progress
from learner.checkpointer import Checkpointer
from learner.deepspeed_engine import join_group
from learner.trainer import Trainer
from tests.unit.learner.support import random_batch, run_config

port, model, folder = sys.argv[1:]
join_group(0, 1, f"127.0.0.1:{port}", "cpu", timeout_s=120)
trainer = Trainer(run_config(lr=3e-3, warmup_steps=0), Path(model), rank=0, world=1, device="cpu")
checkpointer = Checkpointer(trainer, Path(folder), keep=1, keep_best=0)
sync = checkpoint._sync
trainer.train_step(random_batch(step=1))
checkpointer.start(Progress(1, 1), 0.0)
checkpointer.finish()

def hang(written):
    print("half written", flush=True)
    threading.Event().wait(120)

checkpoint._sync = hang
trainer.train_step(random_batch(step=2))
checkpointer.start(Progress(2, 2), 0.0)
trainer.train_step(random_batch(step=3))  # goes on meanwhile
print("trained on", flush=True)
checkpointer.finish()
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path):
    model, folder = tiny_model(tmp_path / "model"), tmp_path / "checkpoints"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    learner = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(port), str(model), str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
    )
    watchdog = threading.Timer(DEADLINE_S, learner.kill)
    watchdog.start()
    try:
        assert learner.stdout is not None
        said = set()
        for line in learner.stdout:
            said.add(line.strip())
            if line == "trained on\n":
                break
    finally:
        learner.kill()
        learner.wait(30)
        watchdog.cancel()
    assert said >= {"half written", "trained on"}
    assert sorted(p.name for p in folder.iterdir()) == [".step-2.partial", "step-1"]
    curve, _ = run(model, world=1, resume_from=folder)
    assert len(curve) == 3  # it resumed at step 1 and trained on


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_resume_where_their_checkpoint_was(tmp_path, stage):
    model = tiny_model(tmp_path / "model")
    curve, _ = run(model, world=2, save_to=tmp_path / "checkpoints", zero_stage=stage)
    resumed, _ = run(model, world=2, resume_from=tmp_path / "checkpoints", zero_stage=stage)
    for got, wanted in zip(resumed[:2], curve[1:], strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
