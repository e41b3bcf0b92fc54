"""Real runs of `launch.py` on a tiny random model with a user's own task, for the integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]

MY_TASK = '''
from tasks import reward
from toolcall import tool


@tool(timeout=5)
async def search(query: str, top_k: int = 3) -> str:
    """Search the catalogue.

    Args:
        query: Words to look for.
        top_k: How many results.
    """
    return f"nothing about {query}"


@reward(weight=1.0)
async def vowels(trajectory, answer: str) -> float:
    """A random model writes noise, so score something of which noise has more or less."""
    text = trajectory.text
    return sum(text.count(letter) for letter in answer) / max(1, len(text))
'''

CONFIG = """
[task]
data = "questions.jsonl"
tools = ["my_task:search"]
rewards = ["my_task:vowels"]
prompt = "Use <search>. {question}"
parser = "tag"
max_turns = 2
max_tokens_per_turn = 12
max_trajectory_tokens = 128

[actors]
group_size = 4
max_groups_in_flight = 4
temperature = 1.0

[buffer]
groups_per_batch = 2
heartbeat_s = 0.5

[learner]
steps = 3
lr = 1e-3
warmup_steps = 1
checkpoint_every = 1

[eval]
before_and_after = false
prompts = 4
"""


def write_task(folder: Path) -> Path:
    """A config with its task module, data and a tiny model in float32 beside it. Returns the config."""
    tiny_model(folder / "model")
    (folder / "my_task.py").write_text(MY_TASK)
    rows = [{"question": f"Which {i}?", "answer": "aeiou"} for i in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = f'[model]\npath = "{folder / "model"}"\ndtype = "float32"\n'
    (folder / "my_task.toml").write_text(model + CONFIG)
    return folder / "my_task.toml"


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), *arguments]


def launch(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run launch.py to its end in its own session, so that nothing of it can outlive the test."""
    process = start(*arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps_of(run_dir: Path) -> list[int]:
    """The learner steps in metrics.jsonl, in order, as rank 0 reported them."""
    reports = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [int(r["metrics"]["learner/step"]) for r in reports if "learner/loss" in r["metrics"]]
