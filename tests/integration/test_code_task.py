"""The code task's hidden tests, run by the real sandbox."""

import asyncio
import json
import random

import pytest

from configs.schema import TaskConfig
from tasks import Episode, load_task, score
from tasks.code import run_tests
from tasks.code_problems import problem
from toolcall.sandbox import Sandbox, SandboxUnavailable

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


def test_a_file_like_mbpps_and_one_like_humanevals_are_scored(tmp_path):
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
    fields = ({"tests": "test_list", "setup": "test_setup_code"}, {"tests": "test", "setup": "prompt"})
    prompts = ("{text} Your code should pass:\n{test_list}", "Complete:\n{prompt}")
    answers = ("```python\ndef double(n):\n    return 2 * n\n```", solved)
    for row, mapped, prompt, answer in zip((mbpp, human), fields, prompts, answers, strict=True):
        (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\r\n")
        settings = {"data": "problems.jsonl", "prompt": prompt, "held_out": 0.0}
        settings["rewards"] = [{"use": "tasks.code:passes_tests", "fields": mapped}]
        settings["tools"] = [{"use": "toolcall.tools.python:python_tool"}]
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
