"""Class tools: which methods are tools, and one object for each trajectory, closed once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.unit.toolcall.support import executor_for, loop_time, run_virtual, turn
from toolcall import BadTool, Outcome, ToolContext, ToolUnavailable, load_tools, tool
from toolcall.lane import Limits

HOUR = 3600.0
log: list[str] = []


@pytest.fixture(autouse=True)
def _empty_log():
    log.clear()


class Base:
    def look(self, where: str) -> str:
        """Look somewhere."""
        return where


@tool(timeout=10, prefix="pad_")
class Notepad(Base):
    """Notes of one trajectory."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def setup(self, context: ToolContext) -> None:
        """Never a tool."""
        await asyncio.sleep(3)
        self.owner = context.trajectory_id
        log.append(f"setup {self.owner}")

    async def close(self) -> None:
        """Never a tool."""
        log.append(f"close {self.owner}")

    async def write(self, text: str) -> str:
        """Write a note.

        Args:
            text: What to write.
        """
        self.notes.append(text)
        if text == "bad":
            raise RuntimeError("broken pen")
        return " ".join(self.notes)

    @tool(timeout=1, idempotent=True)
    async def read(self, context: ToolContext, number: int = 0) -> str:
        """Read one."""
        return f"{context.trajectory_id} {self.notes[number]}"

    @staticmethod
    def helper(x: int) -> int:
        """No method, no tool."""
        return x

    def undocumented(self) -> None:
        pass

    def _private(self) -> None:
        """Hidden."""


def test_public_documented_methods_are_tools_and_setup_and_close_are_not():
    tools = {found.name: found for found in load_tools([Notepad])}
    assert list(tools) == ["pad_look", "pad_write", "pad_read"]
    assert tools["pad_write"].schema()["function"]["parameters"] == {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What to write."}},
        "required": ["text"],
        "additionalProperties": False,
    }
    assert "context" not in tools["pad_read"].signature.parameters["properties"]
    assert (tools["pad_write"].options.timeout, tools["pad_read"].options.timeout) == (10, 1)
    assert tools["pad_read"].options.idempotent and not tools["pad_write"].options.idempotent


def test_a_decorated_class_is_still_the_class():
    class Extended(Notepad):
        pass

    assert isinstance(Extended(), Notepad) and Notepad().notes == []
    with pytest.raises(BadTool, match="the class Extended, not a tool; decorate"):
        load_tools([Extended])


async def _say(executor: Any, context: ToolContext, *texts: str) -> list[str]:
    calls = turn(*(("pad_write", {"text": text}) for text in texts))
    return [result.text for result in await executor.run(calls, context)]


def test_c9_each_trajectory_has_its_own_object_set_up_once_and_closed_once_after_an_exception():
    async def scenario():
        executor = executor_for(*load_tools([Notepad]))
        one, two = ToolContext(trajectory_id="one"), ToolContext(trajectory_id="two")
        texts = await asyncio.gather(_say(executor, one, "a", "b"), _say(executor, two, "bad"))
        assert loop_time() == pytest.approx(3)  # one setup for both calls of a turn
        texts.append(await _say(executor, one, "c"))
        (read,) = await executor.run(turn(("pad_read", {"number": 1})), one)
        assert sorted(log) == ["setup one", "setup two"]
        for context in (one, two, one):
            await executor.finish(context)
        return texts, read.text

    texts, read = run_virtual(scenario())
    assert texts == [["a", "a b"], ["RuntimeError: broken pen"], ["a b c"]]
    assert read == "one b"
    assert log[2:] == ["close one", "close two"]


def test_c9_a_trajectory_that_never_calls_makes_no_object():
    async def scenario():
        await executor_for(*load_tools([Notepad])).finish(ToolContext(trajectory_id="one"))

    run_virtual(scenario())
    assert log == []


def failing_setup(error: Exception | None, seconds: float = 0.0) -> type:
    """A class whose first setup fails, or takes `seconds`."""

    @tool(setup_timeout=20)
    class Flaky:
        made = 0

        def __init__(self) -> None:
            Flaky.made += 1
            self.number = Flaky.made

        async def setup(self) -> None:
            if self.number == 1:
                await asyncio.sleep(seconds)
                if error:
                    raise error

        async def close(self) -> None:
            log.append(f"close {self.number}")

        async def work(self) -> str:
            """Work."""
            return f"object {self.number}"

    return Flaky


@pytest.mark.parametrize(
    ("error", "seconds", "outcome", "text"),
    [
        (RuntimeError("no disk"), 0, Outcome.TOOL_ERROR, "RuntimeError: no disk"),
        (ToolUnavailable("no server"), 0, Outcome.INFRASTRUCTURE, "work is unavailable (no server)"),
        (None, HOUR, Outcome.TIMEOUT, "work timed out (no answer within 20 s)"),
    ],
)
def test_c9_a_setup_that_fails_is_told_and_closed_and_the_next_call_has_a_new_object(
    error, seconds, outcome, text
):
    async def scenario():
        executor, context = executor_for(*load_tools([failing_setup(error, seconds)])), ToolContext()
        first = await executor.run(turn(("work", {}), ("work", {})), context)
        (later,) = await executor.run(turn(("work", {})), context)
        await executor.finish(context)
        return first, later

    first, later = run_virtual(scenario())
    assert [result.outcome for result in first] == [outcome] * 2
    assert first[0].text.startswith(text) and later.text == "object 2"
    assert log == ["close 2", "close 1"]


def test_c9_a_trajectory_cancelled_during_setup_is_closed():
    async def scenario():
        executor, context = executor_for(*load_tools([failing_setup(None, HOUR)])), ToolContext()
        run = asyncio.create_task(executor.run(turn(("work", {})), context))
        await asyncio.sleep(1)
        run.cancel()
        await asyncio.wait({run})
        await executor.finish(context)
        assert loop_time() == pytest.approx(1)

    run_virtual(scenario())
    assert log == ["close 1"]


def test_c9_one_close_that_hangs_or_raises_does_not_keep_the_others_from_closing():
    @tool
    class Hangs:
        async def close(self) -> None:
            await asyncio.sleep(HOUR)

        async def hang(self) -> str:
            """Work."""
            return "ok"

    async def scenario():
        executor = executor_for(*load_tools([failing_setup(None), Hangs]))
        context = ToolContext()
        await executor.run(turn(("work", {}), ("hang", {})), context)
        with pytest.raises(TimeoutError, match=r"Hangs\.close: no answer within 10 s"):
            await executor.finish(context)

    run_virtual(scenario())
    assert log == ["close 1"]


def test_synchronous_methods_of_one_object_take_turns_and_a_hung_one_is_not_joined():
    release = threading.Event()

    @tool(timeout=0.05)
    class Slow:
        def __init__(self) -> None:
            self.inside = 0

        def hang(self) -> str:
            """Hang."""
            release.wait(30)
            return "late"

        @tool(timeout=5)
        def step(self) -> str:
            """Step."""
            self.inside += 1
            assert self.inside == 1
            time.sleep(0.01)
            self.inside -= 1
            return "done"

    async def scenario():
        executor = executor_for(*load_tools([Slow]), clock=time.time)
        context, other = ToolContext(), ToolContext()
        steps = await executor.run(turn(("step", {}), ("step", {}), ("step", {})), context)
        (hung,) = await executor.run(turn(("hang", {})), context)
        (refused,) = await executor.run(turn(("step", {})), context)
        (fine,) = await executor.run(turn(("step", {})), other)
        release.set()
        return steps, hung, refused, fine

    steps, hung, refused, fine = asyncio.run(scenario())
    assert [result.text for result in steps] == ["done"] * 3
    assert hung.outcome is Outcome.TIMEOUT and fine.text == "done"
    assert refused.text == "an earlier call on the same object has not come back"


def test_what_cannot_be_a_tool_class_is_refused():
    class Empty:
        def work(self) -> str:
            return ""

    class Needs:
        def __init__(self, path: str) -> None:
            self.path = path

    class Setup:
        def setup(self, a: int, b: int) -> None:
            pass

    class Cached:
        async def work(self) -> str:
            """Work."""
            return ""

    for cls, options, message in [
        (Empty, {}, "no public method with a docstring"),
        (Needs, {}, "give 'path' a default"),
        (Setup, {}, r"setup must be a method setup\(self, context\)"),
        (Cached, {"name": "x"}, "prefix"),
        (Cached, {"setup_timeout": 0}, "setup_timeout"),
        (Cached, {"cache": True, "idempotent": True}, "nor belong to a class"),
        (Cached, {"timeuot": 3}, "no option 'timeuot'; did you mean 'timeout'"),
    ]:
        with pytest.raises(BadTool, match=message):
            tool(**options)(cls)


def test_setups_that_hang_in_threads_are_counted_and_stop_the_tool():
    release = threading.Event()

    @tool(setup_timeout=0.02)
    class Stuck:
        def setup(self) -> None:
            release.wait(30)

        async def work(self) -> str:
            """Work."""
            return "done"

    async def scenario():
        executor = executor_for(*load_tools([Stuck]), clock=time.time, limits=Limits(max_left_behind=2))
        results = [(await executor.run(turn(("work", {})), ToolContext()))[0] for _ in range(3)]
        release.set()
        return results

    results = asyncio.run(scenario())
    assert [result.outcome for result in results] == [Outcome.TIMEOUT] * 2 + [Outcome.INFRASTRUCTURE]
    assert "2 of its calls never came back" in results[2].text
