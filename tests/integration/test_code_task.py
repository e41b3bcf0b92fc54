"""The code task's hidden tests, run by the real sandbox."""

import asyncio
import random

import pytest

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


def test_every_problem_can_be_solved_and_its_tests_run():
    rows = [problem(random.Random(n), 1) for n in range(3)]
    for row in rows:
        table = "TABLE = {}\n" + "\n".join(
            test.replace("assert solve(", "TABLE[repr(").replace(") == ", ")] = ", 1) for test in row["tests"]
        )
        found = asyncio.run(run_tests(f"{table}\ndef solve(x):\n    return TABLE[repr(x)]\n", row["tests"]))
        assert all(found)
