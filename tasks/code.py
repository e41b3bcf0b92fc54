"""The shipped task `code`: write a Python function, try it in the sandbox, be scored by hidden tests.

Problems are made from a seed, in three grades of difficulty; files like MBPP's and HumanEval's work through
the rewards alone:

    data = "mbpp.jsonl", rewards = [{ use = "tasks.code:passes_tests", fields = { tests = "test_list" } }]

Invariant: code that crashes, hangs, exits early, prints what tests would print or returns what equals
everything passes no test; only a machine without a working sandbox leaves a trajectory unscored. Called by
`tasks.loading`.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from tasks.code_judge import PASSED
from tasks.code_problems import GRADES, problem
from tasks.conduct import well_formed_calls
from tasks.reward import reward
from tasks.rules import final_text
from tasks.scoring import Unscorable
from tasks.shipped import check_choice, check_range, drawn_rows
from tasks.types import Episode, Message, Reward, Row, Task
from toolcall.parsers import make_parser
from toolcall.sandbox import Limits, Sandbox, SandboxUnavailable
from toolcall.tools.python import python_tool

SYSTEM = {
    "tag": "Try code in <python></python>. Then give the whole function in a ```python block.",
    "auto": "Try code with the python tool. Then give the whole function in a ```python block.",
}
LIMITS = Limits(wall_s=10, cpu_s=5, memory_mb=256)
HELD_OUT_SEED = -1
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_JUDGE = Path(__file__).with_name("code_judge.py").read_text(encoding="utf-8")
_DRIVER = """
import builtins
def _judge(space):
    exec({judge!r}, space)
    space["run"]({code!r}, {tests!r}, {nonce!r})
_judge({{"__builtins__": dict(vars(builtins))}})
"""


def final_code(episode: Episode) -> str | None:
    """The last fenced block of the last turn; None if there is none."""
    blocks = _FENCE.findall(final_text(episode))
    return blocks[-1] if blocks else None


async def run_tests(code: str, tests: Sequence[str]) -> list[bool]:
    """Which of the `assert …` lines hold after `code`. Raises SandboxUnavailable."""
    nonce = secrets.token_hex(16)  # the verdict is the line that begins with it, not what the code prints
    result = await _sandbox().run(driver(code, tests, nonce))
    return verdict_in(result.stdout, nonce, len(tests)) if result.ok else [False] * len(tests)


def driver(code: str, tests: Sequence[str], nonce: str) -> str:
    """The program that runs `tests` after `code`: see `tasks.code_judge`."""
    return _DRIVER.format(judge=_JUDGE, code=code, tests=list(tests), nonce=nonce)


def verdict_in(output: str, nonce: str, count: int) -> list[bool]:
    """What that program said of its `count` tests; none holds if it said nothing whole."""
    for line in reversed(output.splitlines()):
        if line.startswith(nonce) and len(line) == len(nonce) + count:
            return [digit == PASSED for digit in line[len(nonce) :]]
    return [False] * count


@reward(timeout=60)
async def passes_tests(
    episode: Episode, tests: list[str] | str, setup: str = "", entry_point: str = ""
) -> float:
    """1 if the function in the last turn's code block passes all `tests`, else 0.

    tests: lines with assert, or the text of a function `check` that is called with `entry_point`. setup: code
    that runs before.
    """
    return float(all(await _outcome(episode, tests, setup, entry_point)))


@reward(weight=0.2, timeout=60)
async def tests_passed(
    episode: Episode, tests: list[str] | str, setup: str = "", entry_point: str = ""
) -> float:
    """The share of `tests` that it passes."""
    outcome = await _outcome(episode, tests, setup, entry_point)
    return sum(outcome) / len(outcome)


async def _outcome(episode: Episode, tests: Sequence[str] | str, setup: str, entry_point: str) -> list[bool]:
    if isinstance(tests, str):
        tests = [f"{tests}\ncheck({entry_point})" if entry_point else tests] if tests.strip() else []
    if not tests:
        raise Unscorable("the row has no tests")
    code = final_code(episode)
    if code is None:
        return [False] * len(tests)
    try:
        return await run_tests(f"{setup}\n{code}" if setup else code, tests)
    except SandboxUnavailable as error:
        raise Unscorable(str(error)) from error


_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def _sandbox() -> Sandbox:
    """One for each event loop, started at its first run."""
    loop = asyncio.get_running_loop()
    if loop not in _sandboxes:
        _sandboxes[loop] = Sandbox(LIMITS)
    return _sandboxes[loop]


def code_task(
    seed: int,
    syntax: Literal["tag", "auto"] = "tag",
    grade: int = GRADES,
    train_size: int = 2000,
    held_out_size: int = 200,
) -> Task:
    """Functions to write, of difficulty 1 to `grade`, each with two tests shown and six hidden.

    Success: all hidden tests pass. Rewards: `passes_tests` 1, `tests_passed` (their share) 0.2,
    `well_formed_calls` 0.1.
    """
    check_choice("syntax", syntax, SYSTEM)
    check_range("grade", grade, 1, GRADES)
    check_range("train_size", train_size, 1)
    check_range("held_out_size", held_out_size, 1)

    def make(rng: random.Random, number: int) -> Row:
        return problem(rng, 1 + number % grade)

    tool = python_tool(wall_s=10, cpu_s=5, memory_mb=256)
    return Task(
        name="code",
        train=drawn_rows(train_size, seed, make, held_out=False),
        held_out=drawn_rows(held_out_size, HELD_OUT_SEED, make, held_out=True),
        make_messages=lambda row: _messages(SYSTEM[syntax], row),
        tools=(tool,),
        parser=make_parser("tag", tags={"python": (tool.name, "code")}) if syntax == "tag" else None,
        rewards=(
            Reward("passes_tests", passes_tests.fn, 1.0, passes_tests.timeout_s),
            Reward("tests_passed", tests_passed.fn, 0.2, tests_passed.timeout_s),
            Reward("well_formed_calls", well_formed_calls.fn, 0.1),
        ),
        success=lambda episode: episode.scores.get("passes_tests", 0.0) == 1.0,
        tools_in_prompt=syntax == "tag",
    )


def _messages(system: str, row: Row) -> list[Message]:
    shown = "\n".join(row["examples"])
    text = f"{row['question']} Examples:\n{shown}"
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]
