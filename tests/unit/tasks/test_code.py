"""The code task: its problems and its prompt. Its hidden tests run in tests/integration."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import TaskConfig
from tasks import Unscorable, load_task
from tasks.code import driver, final_code, passes_tests, verdict_in
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


TESTS = ("assert solve([1, 2]) == 3", "assert solve([]) == [1, (2, {'a': None})] or solve([]) == 0")
RIGHT = "def solve(x):\n    return sum(x)"
SAME = "def __eq__(self, other):\n        return True"


def judged(code: str, tests: Sequence[str] = TESTS) -> list[bool]:
    """As the sandbox would, in a plain process: no code here needs to be kept in."""
    command = [sys.executable, "-I", "-S", "-c", driver(code, tests, "n0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return verdict_in(done.stdout, "n0", len(tests)) if done.returncode == 0 else [False] * len(tests)


@pytest.mark.parametrize(
    "code",
    [
        f"class A:\n    {SAME}\ndef solve(x): return A()",
        f"class A(int):\n    {SAME}\ndef solve(x): return A()",
        f"class A(list):\n    {SAME}\ndef solve(x): return [A(), A()]",
        f"class A:\n    {SAME}\ndef solve(x): return A() if x else [1, (2, {{'a': A()}})]",
        "class A(float):\n    __eq__ = float.__ne__\ndef solve(x): return A(7)",
        "from unittest.mock import ANY\ndef solve(x): return ANY",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef solve(x): pass",
        "import builtins\nbuiltins.all = builtins.len = lambda *a: True\ndef solve(x): pass",
        "import json\njson.dumps = lambda value: '[true, true]'\ndef solve(x): pass",
        "import ast\nast.parse = lambda *a: compile('1', '', 'exec', 1024)\ndef solve(x): pass",
        "import __main__\n__main__.holds = lambda *a: True\ndef solve(x): pass",
        "import os\nprint('11', flush=True)\nos._exit(0)",
        "def solve(x): raise SystemExit",
        "def solve(x): return 1 / 0",
        "syntax error",
    ],
)
def test_code_that_games_its_tests_passes_none(code):
    assert not any(judged(code))


def test_what_is_right_passes():
    assert judged(RIGHT) == [True, True]
    assert judged("def solve(x):\n    print('11')\n    return 4 if x else 0") == [False, True]
    pair = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef solve(x): return P(x)"
    assert judged(pair, ["assert solve(1) == P(1)", "assert solve(1) != P(2)"]) == [True, True]
    kinds = (
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "def solve(x): return x"
    )
    tests = [
        "assert solve(OrderedDict(a=[1])) == {'a': [1]} and solve(deque([1])) == deque([1])",
        "assert solve(Decimal('0.5')) == 0.5 == solve(Fraction(1, 2)) and solve({1, 2}) == {2, 1}",
        "assert 1 < solve(2) <= 2 and solve(1) in (1, 2) and solve('a') in 'abc' and solve(3) not in {1: 2}",
        "def check(f):\n    assert abs(f(1.5) - 1.5) < 1e-6\n    assert f(None) is None\ncheck(solve)",
        "assert solve(namedtuple('P', 'x')(1)) == (1,) and solve([1]) != (1,) and not solve(0)",
        "assert solve(1) == 2 == 2 or solve(1) == 2",
        "assert solve(1) ==",
    ]
    assert judged(kinds, tests) == [True] * 5 + [False] * 2


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
