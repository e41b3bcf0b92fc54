"""The whole path on real parts: Ray, vLLM, ZeroMQ, SQLite, DeepSpeed, gloo."""

import json
import os
import signal
import sqlite3

import psutil
import pytest

from tests.integration.processes import left_alive
from tests.integration.runs import launch, start, steps_of, write_task

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path):
    return write_task(tmp_path)


def options(tmp_path, name="t"):
    return ("--launch.runs_dir", str(tmp_path / "runs"), "--launch.name", name)


def test_a_users_task_trains_and_exports(config, tmp_path):
    done = launch("--config", str(config), *options(tmp_path))
    run = tmp_path / "runs" / "t"
    assert done.returncode == 0, done.stdout
    assert steps_of(run) == [1, 2, 3]
    for name in ("config.toml", "metrics.jsonl", "buffer.sqlite", "logs/actor-0.log", "export/config.json"):
        assert (run / name).exists(), name
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run / "export")


def test_demonstrations_are_learned_on_the_same_path_without_an_engine(config, tmp_path):
    chat = [{"role": "user", "content": "What is 12 times 7?"}, {"role": "assistant", "content": "84"}]
    demos = tmp_path / "demos.jsonl"
    demos.write_text(json.dumps({"messages": chat}) + "\n")
    done = launch(
        *("sft", "--config", str(config), "--data", str(demos), *options(tmp_path)),
        *("--steps", "8", "--learner.lr", "1e-2"),
    )
    run = tmp_path / "runs" / "t"
    assert done.returncode == 0, done.stdout
    assert steps_of(run) == list(range(1, 9))
    reports = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [metrics["learner/loss"] for metrics in reports if "learner/loss" in metrics]
    assert losses[-1] < 0.5 * losses[0]
    assert (run / "export" / "model.safetensors").exists()


def test_two_actors_and_two_learners(config, tmp_path):
    done = launch("--config", str(config), "--actors", "2", "--learners", "2", *options(tmp_path))
    assert done.returncode == 0, done.stdout
    assert steps_of(tmp_path / "runs" / "t") == [1, 2, 3]


def test_interrupt_stops_cleanly_and_resume_goes_on(config, tmp_path):
    process = start("--config", str(config), "--steps", "500", *options(tmp_path))
    run = tmp_path / "runs" / "t"
    for line in process.stdout:  # one plain line a step
        if line.startswith("step") and "2/500" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert left_alive(family, 5) == []
    done_before = max(steps_of(run))
    done = launch("--resume", str(run), "--steps", str(done_before + 2))
    assert done.returncode == 0, done.stdout
    assert max(steps_of(run)) == done_before + 2


def test_a_killed_actor_is_replaced_and_the_run_goes_on(config, tmp_path):
    process = start("--config", str(config), "--steps", "30", *options(tmp_path))
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("step 1/30"):
            break
    engines = [p for p in psutil.Process(process.pid).children(recursive=True) if "EngineCore" in p.name()]
    log = (tmp_path / "runs" / "t" / "logs" / "actor-0.log").read_text()
    pid = int(log.split("pid ")[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    rest, _ = process.communicate(timeout=240)
    assert process.returncode == 0, "".join(output) + rest
    assert steps_of(tmp_path / "runs" / "t") == list(range(1, 31))
    assert left_alive(engines, 5) == []
    store = sqlite3.connect(tmp_path / "runs" / "t" / "buffer.sqlite")
    assert store.execute("pragma integrity_check").fetchone() == ("ok",)


def test_evaluations_during_training_run_on_the_actors_and_are_no_part_of_the_batches(config, tmp_path):
    done = launch(
        *("--config", str(config), "--steps", "5", *options(tmp_path)),
        *("--eval.every_steps", "2", "--eval.every_prompts", "2", "--task.held_out", "0.3"),
    )
    run = tmp_path / "runs" / "t"
    assert done.returncode == 0, done.stdout
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [report["metrics"] for report in reports if report["role"] == "eval"]
    assert [metrics["eval/step"] for metrics in found] == [2, 4]
    assert all(metrics["eval/prompts"] + metrics["eval/missing"] == 2 for metrics in found)
    assert done.stdout.count("held out, step") == 2 and "held-out prompts: leased" in done.stdout
    store = sqlite3.connect(run / "buffer.sqlite")
    assert store.execute("SELECT count(*) FROM trajectories WHERE group_id LIKE 'eval%'").fetchone() == (0,)
    # So small a model may take its next steps before a prompt is through: that one has no versions.
    sampled = store.execute("SELECT version_min - step FROM held_out WHERE version_min NOTNULL").fetchall()
    assert all(ahead >= 0 for (ahead,) in sampled)


def test_eval_measures_a_model_folder(config, tmp_path):
    out = tmp_path / "eval.json"
    done = launch("eval", "--config", str(config), "--model", str(tmp_path / "model"), "--out", str(out))
    assert done.returncode == 0, done.stdout
    result = json.loads(out.read_text())
    assert result["greedy"]["n"] == result["sampled"]["n"] > 0


def test_the_real_model_trains_two_steps_of_the_shipped_recipe(tmp_path):
    small = ("--actors.group_size", "4", "--buffer.groups_per_batch", "2", "--steps", "2")
    done = launch(*options(tmp_path), *small, "--eval.before_and_after", "false", timeout_s=600)
    assert done.returncode == 0, done.stdout
    reports = [json.loads(line) for line in (tmp_path / "runs/t/metrics.jsonl").read_text().splitlines()]
    steps = [report["metrics"] for report in reports if "learner/loss" in report["metrics"]]
    assert len(steps) == 2
    # T9 on the real model: bf16 engine and learner differ by noise only (measured mean 0.02 - 0.04).
    assert all(step["learner/logprob_gap_mean"] < 0.08 for step in steps)
