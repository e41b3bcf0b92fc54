"""The executor, on a virtual clock: order, deadlines, limits, retries, breaker, cache, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.toolcall.support import executor_for, loop_time, run_one, run_virtual, turn
from toolcall import BadTool, Executor, Outcome, Tool, ToolContext, ToolError, ToolUnavailable, tool
from toolcall.lane import Limits
from toolcall.types import ParseFailure

HOUR = 3600.0


@tool(timeout=10)
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds:g}"


@tool
async def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


def counting(**limits: Any) -> tuple[Tool, list[dict[str, Any]]]:
    """A tool that keeps its calls' contexts and raises what the test puts in `script`, if anything."""
    calls: list[Any] = []
    limits.setdefault("timeout", 10)

    async def body(context: ToolContext, error: str = "") -> str:
        """Work."""
        calls.append({"time": loop_time(), "key": context.idempotency_key})
        if error == "down":
            raise ToolUnavailable("no server")
        if error == "hang":
            await asyncio.sleep(HOUR)
        if error == "once" and len(calls) == 1:
            raise ConnectionError("reset")
        return f"call {len(calls)}"

    return tool(name="work", **limits)(body), calls


# --- results ----------------------------------------------------------------------------------------


def test_c10_slow_fast_and_failing_calls_come_back_in_order():
    async def scenario():
        executor = executor_for(wait, fail)
        calls = turn(("wait", {"seconds": 5}), ("wait", {"seconds": 1}), ("fail", {"why": "no luck"}))
        results = await executor.run(calls, ToolContext())
        assert loop_time() == pytest.approx(5)
        return results

    results = run_virtual(scenario())
    assert [(r.call_id, r.outcome, r.text) for r in results] == [
        ("call_0", Outcome.OK, "waited 5"),
        ("call_1", Outcome.OK, "waited 1"),
        ("call_2", Outcome.TOOL_ERROR, "RuntimeError: no luck"),
    ]
    assert [r.span.ended - r.span.started for r in results] == pytest.approx([5, 1, 0])


def test_c3_an_unknown_tool_is_named_with_the_tools_there_are():
    (result,) = run_virtual(executor_for(wait, fail).run(turn(("wiat", {})), ToolContext()))
    assert result.outcome is Outcome.UNKNOWN_TOOL and result.name == "wiat"
    assert result.text == "there is no tool 'wiat'; did you mean 'wait'? The tools are: wait, fail"


def test_c1_a_parse_failure_is_answered_beside_a_good_call():
    calls = turn(ParseFailure("call_0", "broken at character 3"), ("wait", {"seconds": 0}))
    bad, good = run_virtual(executor_for(wait).run(calls, ToolContext()))
    assert (bad.call_id, bad.outcome, bad.text) == ("call_0", Outcome.PARSE_ERROR, "broken at character 3")
    assert good.outcome is Outcome.OK


def test_c7_refused_arguments_are_told_and_the_tool_does_not_run():
    result = run_virtual(run_one(executor_for(wait), wait, seconds="soon", until=3))
    assert result.outcome is Outcome.INVALID_ARGUMENTS
    assert "'seconds'" in result.text and "unknown argument 'until'" in result.text


def test_c7_text_is_coerced_to_the_hint():
    assert run_virtual(run_one(executor_for(wait), wait, seconds="3")).text == "waited 3"


@pytest.mark.parametrize(
    ("value", "outcome", "text"),
    [
        ({"a": 1}, Outcome.OK, '{"a": 1}'),
        (None, Outcome.OK, "(the tool returned nothing)"),
        (
            b"123",
            Outcome.TOOL_ERROR,
            "the tool returned a value of type bytes of 3 bytes, which",
        ),
        (
            object(),
            Outcome.TOOL_ERROR,
            "the tool returned a value of type object, which",
        ),
    ],
)
def test_c8_return_values_are_converted_or_refused(value, outcome, text):
    @tool
    async def give() -> Any:
        """Give."""
        return value

    result = run_virtual(run_one(executor_for(give), give))
    assert result.outcome is outcome and result.text.startswith(text)


def test_c8_long_output_is_cut_to_the_tools_budget_or_the_executors():
    @tool(max_output_tokens=25)
    async def much(error: bool = False) -> str:
        """Give."""
        if error:
            raise ToolError("y" * 5000)
        return "x" * 5_000_000

    assert len(run_virtual(run_one(executor_for(much), much)).text) <= 100
    assert len(run_virtual(run_one(executor_for(much), much, error=True)).text) <= 100
    wide = tool(much.fn)
    assert 900 < len(run_virtual(run_one(executor_for(wide, max_output_tokens=250), wide)).text) <= 1000


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("say this"), "say this"),
        (ValueError("division by zero"), "division by zero"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (StopAsyncIteration(), "StopAsyncIteration"),
        (SystemExit(3), "RuntimeError: tried to exit the process (3)"),
    ],
)
def test_c8_what_a_tool_raises_becomes_text(error, text):
    @tool
    async def bad() -> str:
        """Fail."""
        raise error

    result = run_virtual(run_one(executor_for(bad), bad))
    assert (result.outcome, result.text) == (Outcome.TOOL_ERROR, text)


def test_a_tool_that_cancels_itself_does_not_cancel_the_others():
    @tool
    async def give_up() -> str:
        """Cancel."""
        raise asyncio.CancelledError

    calls = turn(("give_up", {}), ("wait", {"seconds": 1}))
    first, second = run_virtual(executor_for(give_up, wait).run(calls, ToolContext()))
    assert (first.outcome, second.outcome) == (Outcome.CANCELLED, Outcome.OK)


# --- deadlines and slots ------------------------------------------------------------------------------


def test_c8_a_hanging_tool_is_cancelled_at_its_deadline():
    cancelled = []

    @tool(timeout=10, idempotent=True)
    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.sleep(HOUR)
        except asyncio.CancelledError:
            cancelled.append(loop_time())
            raise
        return "never"

    result = run_virtual(run_one(executor_for(hang), hang))
    assert result.outcome is Outcome.TIMEOUT and cancelled == [pytest.approx(10)]
    assert result.text == "hang timed out (no answer within 10 s)"


def test_a_tool_that_ignores_its_cancellation_is_left_behind():
    @tool(timeout=10)
    async def stubborn() -> str:
        """Hang."""
        while True:
            try:
                await asyncio.sleep(HOUR)
                return "at last"
            except asyncio.CancelledError:
                continue

    async def scenario():
        executor = executor_for(stubborn, limits=Limits(max_left_behind=2))
        outcomes = []
        for _ in range(3):
            outcomes.append((await run_one(executor, stubborn)).outcome)
        assert loop_time() == pytest.approx(2 * 11)
        await asyncio.sleep(HOUR + 30)  # they end at last
        return outcomes, (await run_one(executor, stubborn)).outcome

    outcomes, later = run_virtual(scenario())
    assert outcomes == [Outcome.TIMEOUT, Outcome.TIMEOUT, Outcome.INFRASTRUCTURE]
    assert later is Outcome.TIMEOUT  # tried again


def test_a_slot_is_waited_for_and_the_wait_is_not_the_tools_time():
    running = []

    @tool(timeout=10, max_concurrency=2)
    async def slow(number: int) -> str:
        """Work."""
        running.append(number)
        assert len(running) <= 2
        await asyncio.sleep(9)
        running.remove(number)
        return "done"

    async def scenario():
        executor = executor_for(slow)
        trajectories = [executor.run(turn(("slow", {"number": n})), ToolContext()) for n in range(6)]
        return [result for (result,) in await asyncio.gather(*trajectories)]

    results = run_virtual(scenario())
    assert [r.outcome for r in results] == [Outcome.OK] * 6
    assert [r.span.started for r in results] == pytest.approx([0, 0, 9, 9, 18, 18])
    assert all(r.span.queued == 0 for r in results)


def test_waiting_for_a_slot_has_an_end():
    @tool(timeout=HOUR, max_concurrency=1, queue_timeout=60)
    async def slow() -> str:
        """Work."""
        await asyncio.sleep(HOUR - 1)
        return "done"

    async def scenario():
        executor = executor_for(slow)
        return await executor.run(turn(("slow", {}), ("slow", {})), ToolContext())

    first, second = run_virtual(scenario())
    assert first.outcome is Outcome.OK and second.outcome is Outcome.INFRASTRUCTURE
    assert "busy for 60 s, so the call did not run" in second.text


# --- retries ------------------------------------------------------------------------------------------


def test_an_idempotent_tool_is_retried_with_the_same_key_and_growing_pauses():
    work, calls = counting(idempotent=True, retries=3)
    result = run_virtual(run_one(executor_for(work), work, error="down"))
    assert result.outcome is Outcome.INFRASTRUCTURE and len(calls) == 4
    assert len({call["key"] for call in calls}) == 1 and calls[0]["key"]
    pauses = [after["time"] - before["time"] for before, after in pairwise(calls)]
    assert all(0.1 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(pauses))


def test_a_retry_that_succeeds_is_an_answer():
    work, calls = counting(idempotent=True, retries=1)
    result = run_virtual(run_one(executor_for(work), work, error="once"))
    assert (result.outcome, result.text, len(calls)) == (Outcome.OK, "call 2", 2)


def test_what_the_tool_itself_refuses_is_not_retried():
    calls = []

    @tool(idempotent=True, retries=3)
    async def refuse() -> str:
        """Refuse."""
        calls.append(1)
        raise ValueError("no")

    run_virtual(run_one(executor_for(refuse), refuse))
    assert len(calls) == 1


@pytest.mark.parametrize(("error", "outcome"), [("hang", Outcome.TIMEOUT), ("down", Outcome.INFRASTRUCTURE)])
def test_c13_a_tool_that_is_not_idempotent_is_not_retried_and_the_outcome_is_unknown(error, outcome):
    work, calls = counting()
    result = run_virtual(run_one(executor_for(work), work, error=error))
    assert result.outcome is outcome and len(calls) == 1
    assert "the outcome is unknown" in result.text and "not retried" in result.text


def test_each_call_has_its_own_idempotency_key():
    work, calls = counting()
    run_virtual(executor_for(work).run(turn(("work", {}), ("work", {})), ToolContext()))
    assert calls[0]["key"] != calls[1]["key"]


# --- breaker ------------------------------------------------------------------------------------------


def test_the_breaker_opens_after_failures_in_a_row_and_tries_again_later():
    work, calls = counting(idempotent=True, breaker_threshold=3, breaker_cooldown=30)

    async def scenario():
        executor = executor_for(work)
        outcomes = [(await run_one(executor, work, error="down")).outcome for _ in range(5)]
        assert outcomes == [Outcome.INFRASTRUCTURE] * 3 + [Outcome.BREAKER_OPEN] * 2 and len(calls) == 3
        await asyncio.sleep(30)
        trial = turn(("work", {"error": "hang"}), ("work", {}))  # the first is the one trial
        assert [r.outcome for r in await executor.run(trial, ToolContext())] == [
            Outcome.TIMEOUT,
            Outcome.BREAKER_OPEN,
        ]
        assert (await run_one(executor, work)).outcome is Outcome.BREAKER_OPEN
        await asyncio.sleep(30)
        return [(await run_one(executor, work)).outcome for _ in range(2)]

    assert run_virtual(scenario()) == [Outcome.OK, Outcome.OK]


def test_a_cancelled_trial_leaves_the_breaker_half_open():
    work, _calls = counting(idempotent=True, breaker_threshold=1, breaker_cooldown=30)

    async def scenario():
        executor = executor_for(work)
        await run_one(executor, work, error="down")
        await asyncio.sleep(30)
        trial = asyncio.create_task(run_one(executor, work, error="hang"))
        await asyncio.sleep(1)
        trial.cancel()
        await asyncio.wait({trial})
        return (await run_one(executor, work)).outcome

    assert run_virtual(scenario()) is Outcome.OK


def test_errors_that_the_tool_reports_do_not_open_the_breaker():
    async def scenario():
        executor = executor_for(fail.with_options({"breaker_threshold": 2}))
        return [(await run_one(executor, fail, why="x")).outcome for _ in range(5)]

    assert run_virtual(scenario()) == [Outcome.TOOL_ERROR] * 5


# --- cache --------------------------------------------------------------------------------------------


def cached_tool(seconds: float = 5.0) -> tuple[Tool, list[str]]:
    runs: list[str] = []

    @tool(idempotent=True, cache=True, timeout=60)
    async def look(query: str, top_k: int = 3) -> str:
        """Look."""
        runs.append(query)
        await asyncio.sleep(seconds)
        if query == "bad":
            raise ValueError("no")
        return f"{query} {len(runs)}"

    return look, runs


def test_equal_calls_share_one_run_and_later_ones_its_result():
    look, runs = cached_tool()

    async def scenario():
        executor = executor_for(look)
        same = {"top_k": "4", "query": "cats"}, {"query": "cats", "top_k": 4}
        results = await executor.run(turn(*(("look", arguments) for arguments in same)), ToolContext())
        return [*results, await run_one(executor, look, query="cats", top_k=4)], loop_time()

    results, elapsed = run_virtual(scenario())
    assert runs == ["cats"] and elapsed == pytest.approx(5)
    assert [r.text for r in results] == ["cats 1"] * 3
    assert [r.span.cache for r in results] == ["made", "shared", "kept"]
    assert results[2].span.ended == results[2].span.started


def test_failures_are_not_kept():
    look, runs = cached_tool()

    async def scenario():
        executor = executor_for(look)
        return [(await run_one(executor, look, query="bad")).outcome for _ in range(2)]

    assert run_virtual(scenario()) == [Outcome.TOOL_ERROR] * 2 and len(runs) == 2


def test_the_cache_forgets_the_least_recently_used():
    look, runs = cached_tool()

    async def scenario():
        executor = executor_for(look, cache_entries=2)
        for query in ("a", "b", "a", "c", "a", "b"):
            await run_one(executor, look, query=query)

    run_virtual(scenario())
    assert runs == ["a", "b", "c", "b"]


def test_a_trajectory_that_ends_does_not_take_a_shared_run_from_the_others():
    look, runs = cached_tool()

    async def scenario():
        executor = executor_for(look)
        leader = asyncio.create_task(run_one(executor, look, query="cats"))
        follower = asyncio.create_task(run_one(executor, look, query="cats"))
        await asyncio.sleep(1)
        leader.cancel()
        result = await follower
        assert leader.cancelled()
        return result

    assert run_virtual(scenario()).text == "cats 1" and runs == ["cats"]


def test_a_shared_run_that_nobody_waits_for_is_cancelled():
    look, runs = cached_tool()

    async def scenario():
        executor = executor_for(look)
        only = asyncio.create_task(run_one(executor, look, query="cats"))
        await asyncio.sleep(1)
        only.cancel()
        await asyncio.wait({only})
        return (await run_one(executor, look, query="cats")).text

    assert run_virtual(scenario()) == "cats 2" and runs == ["cats", "cats"]


# --- cancellation, context, counters -------------------------------------------------------------------


def test_cancelling_the_run_cancels_its_calls_and_propagates():
    stopped = []

    @tool(timeout=HOUR)
    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.sleep(HOUR)
        finally:
            stopped.append(loop_time())
        return "never"

    async def scenario():
        executor = executor_for(hang)
        run = asyncio.create_task(executor.run(turn(("hang", {}), ("hang", {})), ToolContext()))
        await asyncio.sleep(3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return len(others)

    assert run_virtual(scenario()) == 0 and stopped == [pytest.approx(3)] * 2


def test_c9_state_is_the_trajectorys_own_and_cleaned_up_once():
    closed = []

    @tool
    async def note(text: str, context: ToolContext) -> str:
        """Note."""
        if "notes" not in context.state:
            context.state["notes"] = []
            context.resources.callback(closed.append, context.trajectory_id)
        context.state["notes"].append(text)
        if text == "bad":
            raise RuntimeError("broken pen")
        return " ".join(context.state["notes"])

    async def scenario():
        executor = executor_for(note)
        one, two = ToolContext(trajectory_id="one"), ToolContext(trajectory_id="two")
        texts = []
        for context, text in ((one, "a"), (two, "b"), (one, "c"), (two, "bad")):
            (result,) = await executor.run(turn(("note", {"text": text})), context)
            texts.append(result.text)
        for context in (one, two, one):
            await executor.finish(context)
        return texts

    assert run_virtual(scenario()) == ["a", "b", "a c", "RuntimeError: broken pen"]
    assert closed == ["one", "two"]


def test_counters_per_tool_and_per_report_window():
    async def scenario():
        executor = executor_for(wait, fail)
        await executor.run(
            turn(("wait", {"seconds": 2}), ("fail", {"why": "x"}), ("wait", {})), ToolContext()
        )
        await run_one(executor, wait, seconds=4)
        return executor

    executor = run_virtual(scenario())
    taken = executor.take_metrics()
    assert {name: taken[f"tool/wait/{name}"] for name in ("calls", "failures", "running_max")} == {
        "calls": 3,
        "failures": 1,
        "running_max": 1,
    }
    latencies = [taken[f"tool/wait/latency_{share}_s"] for share in ("p50", "p95", "p99")]
    assert latencies == pytest.approx([2, 4, 4])
    assert taken["tool/fail/failures"] == 1 and taken["tool/fail/infrastructure"] == 0
    assert executor.take_metrics() == {}
    stats = executor.stats()["wait"]
    assert (stats.calls, stats.failures, stats.seconds, stats.slowest_s) == (
        3,
        1,
        pytest.approx(6),
        pytest.approx(4),
    )


def test_names_the_model_invents_do_not_fill_the_counters():
    calls = turn(*((f"invented_{n}", {}) for n in range(50)))
    executor = executor_for(wait)
    run_virtual(executor.run(calls, ToolContext()))
    assert list(executor.stats()) == ["unknown"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(BadTool, match="two tools"):
        Executor([wait, wait])


# --- tools in threads (real time) -----------------------------------------------------------------------


def test_sync_tools_run_side_by_side_and_off_the_event_loop():
    both_running = threading.Barrier(2)

    @tool
    def meet() -> str:
        """Meet."""
        both_running.wait(timeout=5)
        return threading.current_thread().name

    executor = executor_for(meet, clock=time.time)
    results = asyncio.run(executor.run(turn(("meet", {}), ("meet", {})), ToolContext()))
    assert [r.text for r in results] == ["tool meet"] * 2


def test_hung_sync_tools_cannot_stop_others_nor_themselves_for_ever():
    release = threading.Event()

    @tool(timeout=0.02, max_concurrency=1)
    def hang() -> str:
        """Hang."""
        release.wait(timeout=30)
        return "late"

    @tool
    def quick() -> str:
        """Answer."""
        return "here"

    async def scenario():
        limits = Limits(max_left_behind=3)
        executor = executor_for(hang, quick, clock=time.time, limits=limits)
        outcomes = [(await run_one(executor, hang)).outcome for _ in range(4)]
        assert (await run_one(executor, quick)).text == "here"
        release.set()
        for thread in threading.enumerate():
            if thread.name == "tool hang":
                thread.join(timeout=5)
        return outcomes, (await run_one(executor, hang)).text

    outcomes, later = asyncio.run(scenario())
    assert outcomes == [Outcome.TIMEOUT] * 3 + [Outcome.INFRASTRUCTURE]
    assert later == "late"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration(), "RuntimeError: raised StopIteration"),
        (SystemExit(1), "RuntimeError: raised SystemExit: 1"),
    ],
)
def test_exceptions_that_would_end_the_loop_stay_in_the_thread(error, text):
    @tool
    def bad() -> str:
        """Fail."""
        raise error

    result = asyncio.run(run_one(executor_for(bad, clock=time.time), bad))
    assert (result.outcome, result.text) == (Outcome.TOOL_ERROR, text)
