"""The code task: its problems and its prompt. Its hidden tests run in tests/integration."""

import asyncio
import random
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import TaskConfig
from tasks import Unscorable, load_task
from tasks.code import final_code, passes_tests
from tasks.code_problems import GRADES, problem
from tests.unit.tasks.support import episode


def test_problems_follow_the_seed_and_grade():
    first = [problem(random.Random(3), grade) for grade in range(1, GRADES + 1)]
    assert first == [problem(random.Random(3), grade) for grade in range(1, GRADES + 1)]
    assert [row["grade"] for row in first] == [1, 2, 3]
    assert all(len(row["examples"]) == 2 and len(row["tests"]) == 6 for row in first)
    assert len({test for row in first for test in (*row["examples"], *row["tests"])}) == 24


def test_no_held_out_question_is_trained_on():
    task = load_task(TaskConfig(name="code", options={"train_size": 500}), Path(), seed=1)
    held = {row["question"] for row in task.held_out}
    assert not held & {row["question"] for row in task.train} and len(held) >= 15
    assert len(task.train) == 500 and len(task.held_out) == 200
    text = task.make_messages(task.held_out[0])[-1]["content"]
    assert all(test in text for test in task.held_out[0]["examples"])
    assert not any(test in text for test in task.held_out[0]["tests"])


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        (["```python\nx = 1\n```"], "x = 1\n"),
        (["```\nx = 1\n``` and ```py\nx = 2\n``` done"], "x = 2\n"),
        (["```python\nx = 1\n```", "that is it"], None),
        (["<think>```python\nx = 1\n```</think>"], None),
        (["x = 1"], None),
        ([], None),
    ],
)
def test_r4_the_code_is_the_last_block_of_the_models_last_turn(turns, code):
    assert final_code(episode(*turns)) == code


def test_r3_a_row_without_tests_is_unscorable():
    with pytest.raises(Unscorable, match="no tests"):
        asyncio.run(passes_tests(episode("x"), []))


def test_the_recipe_loads_without_a_warning():
    loaded = load_config(Path("configs/code_cpu.toml"))
    assert loaded.config.task.name == "code" and loaded.warnings == ()
    task = load_task(loaded.config.task, loaded.config_dir, seed=0)
    assert len(task.train) == 2000 and {row["grade"] for row in task.train} == {1}
    for option, value, says in (("grade", 4, "grade = 4"), ("train_size", 0, "train_size = 0")):
        with pytest.raises(ValueError, match=says):
            load_task(TaskConfig(name="code", options={option: value}), Path(), 0)
