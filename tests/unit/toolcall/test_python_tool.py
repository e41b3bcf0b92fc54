"""The `python` tool: what the model reads, sessions, and failures that are not the model's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.toolcall.support import turn
from toolcall import Executor, Outcome, Tool, ToolContext, ToolResult, ToolUnavailable
from toolcall.sandbox import Ended, Limits, Sandbox, SandboxUnavailable
from toolcall.sandbox.unsafe import run_unprotected
from toolcall.tools.python import python_tool

LONG_S = 60


@pytest.fixture(autouse=True)
def a_machine_with_a_sandbox():
    async def start():
        async with Sandbox():
            pass

    try:
        asyncio.run(start())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def call(tool: Tool, *codes: str, context: ToolContext | None = None) -> list[ToolResult]:
    """One result for each code, called in a turn of its own."""
    executor, context = Executor([tool]), context or ToolContext()
    results = [(await executor.run(turn(("python", {"code": code})), context))[0] for code in codes]
    await executor.finish(context)
    return results


def texts(results: list[ToolResult]) -> list[str]:
    return [result.text for result in results]


def test_output_and_the_last_value_are_the_result():
    results = asyncio.run(call(python_tool(), "print('a')\n1 + 1", "x = 1"))
    assert texts(results) == ["a\n2", "(no output)"]
    assert {result.outcome for result in results} == {Outcome.OK}


def test_errors_of_the_code_are_tool_errors_that_the_model_can_read():
    (raised, unread, left) = asyncio.run(call(python_tool(), "print('a')\n1/0", "1 +", "raise SystemExit(3)"))
    assert raised.text.startswith("a\nTraceback") and raised.text.endswith(
        "ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in unread.text
    assert left.text == "exited with code 3"
    assert {result.outcome for result in (raised, unread, left)} == {Outcome.TOOL_ERROR}


def test_a_broken_limit_says_which_and_is_no_infrastructure_failure():
    (result,) = asyncio.run(call(python_tool(wall_s=0.5), "import time; time.sleep(600)"))
    assert (result.outcome, result.text) == (Outcome.TOOL_ERROR, "stopped after 0.5 seconds")


def test_c9_two_trajectories_with_sessions_never_mix():
    async def body():
        tool = python_tool(session=True, wall_s=LONG_S)
        executor, contexts = Executor([tool]), (ToolContext(), ToolContext())
        for number, context in enumerate(contexts):
            await executor.run(turn(("python", {"code": f"x = {number}"})), context)
        seen = [
            (await executor.run(turn(("python", {"code": "x"})), context))[0].text for context in contexts
        ]
        for context in contexts:
            await executor.finish(context)
        return seen

    assert asyncio.run(body()) == ["0", "1"]
    assert list(python_tool(session=True).schema()["function"]["parameters"]["properties"]) == ["code"]


def test_without_a_session_nothing_is_kept():
    results = asyncio.run(call(python_tool(), "x = 1", "x"))
    assert "NameError" in results[1].text


def test_calls_of_one_turn_run_in_order_in_their_session():
    async def body():
        executor, context = Executor([python_tool(session=True, wall_s=LONG_S)]), ToolContext()
        calls = [("python", {"code": code}) for code in ("x = 1", "x += 1", "x *= 10", "x")]
        results = await executor.run(turn(*calls), context)
        await executor.finish(context)
        return results[-1].text

    assert asyncio.run(body()) == "20"


def test_a_session_that_ended_is_said_and_replaced():
    tool = python_tool(session=True, wall_s=LONG_S)
    results = asyncio.run(call(tool, "x = 1", "import os; os._exit(5)", "'x' in globals()"))
    lost = "exited with code 5\nvariables and files of earlier calls are gone"
    assert texts(results) == ["(no output)", lost, "False"]


def test_the_end_of_a_trajectory_ends_its_session():
    async def body() -> Any:
        context = ToolContext()
        await call(python_tool(session=True, wall_s=LONG_S), "x = 1", context=context)
        return context.state["python session"].session

    assert not asyncio.run(body()).alive


def test_a_machine_without_a_sandbox_is_an_infrastructure_failure(monkeypatch):
    async def refuse(self):
        raise SandboxUnavailable("no sandbox on this machine: unshare: Operation not permitted")

    monkeypatch.setattr(Sandbox, "start", refuse)
    (result,) = asyncio.run(call(python_tool(), "1"))
    assert result.outcome is Outcome.INFRASTRUCTURE
    assert "unshare: Operation not permitted" in result.text


def test_preparing_says_which_protections_hold():
    said = asyncio.run(python_tool().prepare())
    assert said.startswith("sandbox: no network, ") and "no capabilities" in said


def test_without_a_sandbox_preparing_names_the_flag_that_allows_it(monkeypatch):
    async def refuse(self):
        raise SandboxUnavailable("no sandbox on this machine: unshare: Operation not permitted")

    monkeypatch.setattr(Sandbox, "start", refuse)
    with pytest.raises(ToolUnavailable, match=r"unshare: .* unsafe_no_sandbox = true"):
        asyncio.run(python_tool().prepare())


def test_the_unsafe_flag_runs_without_a_sandbox_and_says_so(monkeypatch):
    monkeypatch.setattr(Sandbox, "start", None)  # not even tried
    tool = python_tool(unsafe_no_sandbox=True, wall_s=LONG_S)
    (shown, raised) = asyncio.run(call(tool, "open('f', 'w').write('x'); import os\nos.listdir()", "1/0"))
    assert shown.text == "['f']"
    assert raised.text.endswith("ZeroDivisionError: division by zero")
    assert asyncio.run(tool.prepare()).startswith("UNSAFE: no sandbox")


@pytest.mark.parametrize(
    ("code", "limits", "ended"),
    [
        ("import time; time.sleep(600)", Limits(wall_s=0.3), Ended.TIMEOUT),
        ("print('x' * 10_000)", Limits(wall_s=LONG_S, output_bytes=5_000), Ended.OUTPUT),
        ("import os; os.kill(os.getpid(), 9)", Limits(wall_s=LONG_S), Ended.SIGNALLED),
        (
            "import os\nif os.fork() == 0:\n    import time; time.sleep(600)",
            Limits(wall_s=LONG_S),
            Ended.EXITED,
        ),
    ],
)
def test_unprotected_runs_end_too(code, limits, ended):
    result = asyncio.run(run_unprotected(code, limits))
    assert result.ended is ended
    assert len(result.stdout) <= limits.output_bytes


def test_a_session_without_a_sandbox_is_refused():
    with pytest.raises(ValueError, match="session = true needs the sandbox"):
        python_tool(session=True, unsafe_no_sandbox=True)
