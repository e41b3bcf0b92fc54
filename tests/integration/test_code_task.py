"""The code task's hidden tests, run by the real sandbox."""

import asyncio
import json
import random
import re
import tomllib
from pathlib import Path

import pytest

from configs.schema import TaskConfig
from tasks import Episode, load_task, score
from tasks.code import run_tests
from tasks.code_problems import problem
from toolcall.sandbox import Sandbox, SandboxUnavailable

DOCS = Path(__file__).parents[2] / "docs" / "tasks" / "code.md"
TESTS = ["assert solve([3, 4]) == 3", "assert solve([]) == 0"]
RIGHT = "def solve(x):\n    return sum(n for n in x if n % 3 == 0)\n"


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox():
    async def probe():
        async with Sandbox() as sandbox:
            await sandbox.run("1")

    try:
        asyncio.run(probe())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        (RIGHT, [True, True]),
        ("def solve(x):\n    return 3\n", [True, False]),
        ("def solve(x):\n    return 1 / 0\n", [False, False]),
        ("def solve(x:\n", [False, False]),
        ("", [False, False]),
        ("import sys\nsys.exit(0)\n", [False, False]),
        ("import os\nos._exit(0)\n", [False, False]),
        ("print('[true, true]')\nimport os\nos._exit(0)\n", [False, False]),
        ("while True:\n    pass\n", [False, False]),
        ("def solve(x):\n    raise SystemExit\n", [False, False]),
    ],
)
def test_code_passes_the_tests_that_hold(code, passed):
    assert asyncio.run(run_tests(code, TESTS)) == passed


def test_files_like_mbpps_and_humanevals_are_scored_by_the_recipes_of_the_docs(tmp_path):
    mbpp = {
        "text": "Write a function to double a number.",
        "test_list": ["assert double(2) == 4", "assert double(E) == 6"],
        "test_setup_code": "E = 3",
    }
    human = {
        "prompt": 'from typing import List\n\ndef longest(xs: List[str]) -> str:\n    """The longest."""\n',
        "test": "def check(candidate):\n    assert candidate(['a', 'bb']) == 'bb'\n",
        "entry_point": "longest",
    }
    solved = "```python\ndef longest(xs: List[str]) -> str:\n    return max(xs, key=len)\n```"
    answers = ("```python\ndef double(n):\n    return 2 * n\n```", solved)
    recipes = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for row, recipe, answer in zip((mbpp, human), recipes, answers, strict=True):
        settings = tomllib.loads(recipe)["task"] | {"held_out": 0.0}
        (tmp_path / settings["data"]).write_text(json.dumps(row) + "\r\n")
        task = load_task(TaskConfig.model_validate(settings), tmp_path, seed=0)
        made = [
            Episode(task.train[0], (), (text,), ((),), "answer") for text in (answer, "```python\n1\n```")
        ]
        scored = [asyncio.run(score(task.rewards, each)) for each in made]
        assert [each.reward for each in scored] == [1.0, 0.0]


def test_every_problem_can_be_solved_and_its_tests_run():
    rows = [problem(random.Random(n), 1) for n in range(3)]
    for row in rows:
        table = "TABLE = {}\n" + "\n".join(
            test.replace("assert solve(", "TABLE[repr(").replace(") == ", ")] = ", 1) for test in row["tests"]
        )
        found = asyncio.run(run_tests(f"{table}\ndef solve(x):\n    return TABLE[repr(x)]\n", row["tests"]))
        assert all(found)
