"""Limits of a whole run, tools that are down, and a blocked event loop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolcall.support import executor_for, run_one, run_virtual, turn
from toolcall import Outcome, Tool, ToolContext, ToolUnavailable, schema_tool, tool
from toolcall.lane import Limits
from toolcall.run_limits import RunRate, RunSlots
from toolcall.watchdog import LoopWatchdog

HOUR = 3600.0


def working(seconds: float = 10.0, **options: Any) -> Tool:
    @tool(timeout=HOUR, **options)
    async def work() -> str:
        """Work."""
        await asyncio.sleep(seconds)
        return "done"

    return work


async def _at_once(executors: list[Any], work: Tool, calls: int) -> list[Any]:
    runs = [run_one(executor, work) for executor in executors for _ in range(calls)]
    return await asyncio.gather(*runs)


def test_the_runs_slots_are_shared_by_executors(tmp_path):
    work = working(run_concurrency=3, max_concurrency=2)

    async def scenario():
        executors = [executor_for(work, shared=tmp_path) for _ in range(2)]
        results = await _at_once(executors, work, calls=3)
        return sorted(result.span.started for result in results)

    started = run_virtual(scenario())
    assert started[:3] == pytest.approx([0, 0, 0]) and started[3] >= 10
    assert started[3:] == pytest.approx([10, 10, 10], abs=0.5)


def test_without_a_run_folder_the_runs_slots_are_this_executors():
    work = working(run_concurrency=1)
    results = run_virtual(_at_once([executor_for(work)], work, calls=2))
    assert [result.span.started for result in results] == pytest.approx([0, 10])


def _hold_a_slot(folder: Path, held: Any, release: Any) -> None:
    async def hold() -> None:
        async with RunSlots(folder, "work", 1).hold():
            held.set()
            release.wait(30)

    asyncio.run(hold())


def test_a_slot_is_free_again_when_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold_a_slot, args=(tmp_path, held, release))
    other.start()
    assert held.wait(300)

    async def scenario():
        slots = RunSlots(tmp_path, "work", 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), slots.hold():
                pass
        other.kill()
        async with asyncio.timeout(60), slots.hold():
            return "held"

    assert asyncio.run(scenario()) == "held"
    other.join(60)


def test_calls_begin_no_faster_than_the_rate():
    work = working(rate_limit=0.5, seconds=0)
    results = run_virtual(_at_once([executor_for(work)], work, calls=4))
    assert [result.span.started for result in results] == pytest.approx([0, 2, 4, 6])


def test_the_rate_is_shared_through_the_folder_and_a_wait_that_is_too_long_reserves_nothing(tmp_path):
    first, second = RunRate(tmp_path, "work", 0.1), RunRate(tmp_path, "work", 0.1)
    assert first.reserve(60) == 0
    assert second.reserve(60) == pytest.approx(10, abs=5)
    assert first.reserve(5) is None
    assert second.reserve(60) == pytest.approx(20, abs=5)


def test_a_rate_that_cannot_be_kept_is_the_runs_fault_and_not_the_models():
    work = working(rate_limit=0.01, seconds=0)
    first, second = run_virtual(_at_once([executor_for(work)], work, calls=2))
    assert first.outcome is Outcome.OK and second.outcome is Outcome.INFRASTRUCTURE
    assert "was busy for 60 s, so the call did not run" in second.text


# --- tools that are down --------------------------------------------------------------------------------


def flaky(state: dict[str, bool], probe: bool = False) -> Tool:
    async def call(arguments: dict, context: ToolContext) -> str:
        if state["gone"]:
            raise ToolUnavailable("no server")
        return "here"

    async def ask() -> None:
        if state["gone"]:
            raise ConnectionError("refused")

    options: dict[str, Any] = {"idempotent": True, "breaker_threshold": 99}
    return schema_tool("work", "Work.", {}, call, probe=ask if probe else None, **options)


def test_a_tool_is_down_when_enough_of_its_last_calls_found_it_gone_and_up_when_one_does_not():
    state = {"gone": True}

    async def scenario():
        executor = executor_for(work := flaky(state), limits=Limits(down_share=0.5))
        seen = []
        for state["gone"] in [False] * 10 + [True] * 9:
            await run_one(executor, work)
            seen.append(executor.down())
        assert not any(seen)
        state["gone"] = True
        await run_one(executor, work)
        assert executor.down() == {"work": "work is unavailable (no server)"}
        state["gone"] = False
        await run_one(executor, work)
        return executor.down()

    assert run_virtual(scenario()) == {}


def test_what_the_model_does_wrong_never_puts_a_tool_down():
    @tool
    async def work(x: int) -> str:
        """Work."""
        raise ValueError("no")

    async def scenario():
        executor = executor_for(work)
        for arguments in [{"x": 1}, {"x": "a"}] * 40:
            await executor.run(turn(("work", arguments)), ToolContext())
        return executor.down()

    assert run_virtual(scenario()) == {}


def test_a_probe_brings_a_tool_back_and_closes_its_breaker():
    state = {"gone": True}

    async def scenario():
        work = flaky(state, probe=True).with_options({"breaker_threshold": 5, "breaker_cooldown": HOUR})
        executor = executor_for(work)
        outcomes = [(await run_one(executor, work)).outcome for _ in range(20)]
        assert outcomes[-1] is Outcome.BREAKER_OPEN and not await executor.probe()
        assert executor.down() == {"work": "work is unavailable (refused)"}
        state["gone"] = False
        assert await executor.probe() and executor.down() == {}
        return (await run_one(executor, work)).text

    assert run_virtual(scenario()) == "here"


# --- spans ----------------------------------------------------------------------------------------------


def test_every_call_leaves_its_span_also_a_cancelled_one():
    work = working(seconds=HOUR)
    context = ToolContext()

    async def scenario():
        executor = executor_for(work)
        await executor.run(turn(("work", {"x": 1}), ("nothing", {})), context)
        run = asyncio.create_task(executor.run(turn(("work", {}), ("work", {})), context))
        await asyncio.sleep(3)
        run.cancel()
        await asyncio.wait({run})
        return executor.take_metrics()

    metrics = run_virtual(scenario())
    spans = [(span.call_id, span.outcome) for span in context.spans]
    assert spans[:2] == [("call_0", Outcome.INVALID_ARGUMENTS), ("call_1", Outcome.UNKNOWN_TOOL)]
    assert sorted(spans[2:]) == [("call_0", Outcome.CANCELLED), ("call_1", Outcome.CANCELLED)]
    assert [span.ended - span.queued for span in context.spans] == pytest.approx([0, 0, 3, 3])
    assert metrics["tool/work/calls"] == 3 and metrics["tool/unknown/calls"] == 1


# --- a blocked event loop (real time) ---------------------------------------------------------------------


def test_a_loop_that_only_waits_for_a_core_is_not_reported(monkeypatch, caplog):
    monkeypatch.setattr(LoopWatchdog, "_waited_for_a_core", lambda self: time.monotonic())

    async def scenario():
        with LoopWatchdog(lambda name, seconds: None, limit_s=0.01):
            time.sleep(0.1)  # noqa: ASYNC251 - as if another process had the core

    asyncio.run(scenario())
    assert "blocked" not in caplog.text


def test_a_tool_that_blocks_the_loop_is_named_with_its_line_and_counted(caplog):
    reported = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "tool greedy has blocked" in record.getMessage():
                reported.set()

    @tool(timeout=60)
    async def greedy() -> str:
        """Compute without a pause."""
        reported.wait(50)  # blocks the loop until the watchdog has said so
        return "done"

    async def scenario():
        executor = executor_for(greedy, clock=time.time)
        noted = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(name: str, seconds: float) -> None:
            executor.note_blocked(name, seconds)
            if name == "tool greedy":
                loop.call_soon_threadsafe(noted.set)

        with LoopWatchdog(note, limit_s=0.2):
            await run_one(executor, greedy)
            async with asyncio.timeout(60):
                await noted.wait()
        return executor.take_metrics()

    handler = Told()
    watchdog_logger = logging.getLogger("toolcall.watchdog")
    watchdog_logger.addHandler(handler)
    try:
        metrics = asyncio.run(scenario())
    finally:
        watchdog_logger.removeHandler(handler)
    assert "tool greedy has blocked the event loop" in caplog.text
    assert "test_executor_limits.py" in caplog.text and "in greedy" in caplog.text
    assert metrics["tool/greedy/blocked_s"] > 0.2
