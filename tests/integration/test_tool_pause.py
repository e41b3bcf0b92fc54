"""A run whose tool's server dies and comes back: it stops leasing, says so, and goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.integration.runs import start, steps_of
from tests.tiny import tiny_model
from tests.unit.toolcall.mcp_site import HandWrittenSite

pytestmark = pytest.mark.slow

DEADLINE_S = 600.0  # of a busy machine, for the whole test
CALL = ["<find>", "cats", "</find>"]

MY_TASK = """
import random

from tasks import reward


@reward(weight=1.0)
async def luck(trajectory) -> float:
    return random.random()  # members of a group must differ for a step
"""

CONFIG = """
[model]
path = "{model}"
dtype = "float32"

[task]
data = "questions.jsonl"
rewards = ["my_task:luck"]
prompt = "Use <find>. {{question}}"
parser = "tag"
parser_options = {{ tags = {{ find = ["echo", "text"] }} }}
max_turns = 3
max_tokens_per_turn = 12
max_trajectory_tokens = 256

[task.mcp.town]
url = "{url}"
include = ["echo"]
connect_timeout_s = 2
timeout_s = 2

[actors]
group_size = 4
max_groups_in_flight = 4

[buffer]
groups_per_batch = 1
heartbeat_s = 0.5

[learner]
steps = 100000
lr = 1e-6

[eval]
before_and_after = false
"""


def calling_model(folder: Path) -> None:
    """A model that writes `CALL` after every line break: each token alone decides the next."""
    tiny_model(folder, tie_embeddings=False, more_tokens=CALL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode("\n")[-1], *tokenizer.convert_tokens_to_ids(CALL)]
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in pairwise(ids):
            seen = model.model.embed_tokens.weight[before]
            model.lm_head.weight[after] = 4 * seen / seen.norm()
    model.save_pretrained(folder)


def write_task(folder: Path, url: str) -> Path:
    calling_model(folder / "model")
    (folder / "my_task.py").write_text(MY_TASK)
    rows = [{"question": f"Which {i}?"} for i in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_task.toml").write_text(CONFIG.format(model=folder / "model", url=url))
    return folder / "my_task.toml"


def line_with(words: str, lines: Iterator[str]) -> str:
    seen = []
    for line in lines:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"no line with {words!r}:\n{''.join(seen)}")


def test_a_run_leases_nothing_while_its_tool_is_dead_and_goes_on_when_it_is_back(tmp_path):
    with HandWrittenSite() as site:
        port = site.port
        config = write_task(tmp_path, site.url)
        process = start("--config", str(config), "--launch.runs_dir", str(tmp_path), "--launch.name", "t")
        deadline = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
        deadline.start()  # ends the lines that are waited for
        assert process.stdout is not None
        lines = iter(process.stdout)
        line_with("step", lines)
    try:
        assert "actor-0 paused: echo is unavailable" in line_with("paused: ", lines)
        with HandWrittenSite(port):
            line_with("actor-0 goes on", lines)
            before = max(steps_of(tmp_path / "t"))
            while max(steps_of(tmp_path / "t")) < before + 2:
                line_with("step", lines)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_S)
    finally:
        deadline.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    lines = (tmp_path / "t" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert [event for event in events if event in ("pause", "resume")] == ["pause", "resume"]
