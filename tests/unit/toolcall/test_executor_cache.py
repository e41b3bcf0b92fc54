"""The result cache: age, version, the store on disk, and what of it is seen."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolcall.support import executor_for, loop_time, run_one, run_virtual
from toolcall import BadTool, Executor, Outcome, Tool, schema_tool, tool
from toolcall.single_flight import Served, SingleFlight


def looking(**options: Any) -> tuple[Tool, list[str]]:
    runs: list[str] = []

    @tool(idempotent=True, **{"cache": "memory", **options})
    async def look(query: str) -> str:
        """Look."""
        runs.append(query)
        if query == "bad":
            raise ValueError("no")
        return f"{query} {len(runs)}"

    return look, runs


def test_a_kept_result_is_served_until_its_ttl_and_its_age_is_told():
    look, runs = looking(cache_ttl=60)

    async def scenario():
        executor = executor_for(look)
        results = []
        for seconds in (0, 50, 20, 0):
            await asyncio.sleep(seconds)
            results.append(await run_one(executor, look, query="a"))
        return results, executor.take_metrics()

    results, metrics = run_virtual(scenario())
    assert [r.text for r in results] == ["a 1", "a 1", "a 2", "a 2"] and len(runs) == 2
    assert [r.span.cache for r in results] == ["made", "kept", "made", "kept"]
    assert results[1].span.cache_age_s == pytest.approx(50)
    assert (metrics["tool/look/cache_hits"], metrics["tool/look/cache_age_s"]) == (2, pytest.approx(25))


def test_a_cancelled_run_that_still_cleans_up_leaves_its_successor_to_be_shared():
    async def scenario():
        flights: SingleFlight[str] = SingleFlight(4, keep=lambda value: True)
        cleaned, go = asyncio.Event(), asyncio.Event()
        runs = 0

        async def make() -> str:
            nonlocal runs
            runs += 1
            try:
                await go.wait()
            except asyncio.CancelledError:
                await cleaned.wait()
                raise
            return "value"

        def ask() -> asyncio.Task[tuple[str, Served]]:
            return asyncio.create_task(flights.get("key", make, lambda value: True))

        first = ask()
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.wait({first})
        second = ask()
        await asyncio.sleep(1)
        cleaned.set()
        await asyncio.sleep(1)
        third = ask()
        await asyncio.sleep(1)
        go.set()
        return runs, (await second)[1], (await third)[1]

    assert run_virtual(scenario()) == (2, Served.MADE, Served.SHARED)


def real(look: Tool, shared: Path) -> Executor:
    return executor_for(look, clock=time.time, shared=shared)


def test_the_store_on_disk_is_shared_by_executors_and_outlives_them(tmp_path):
    look, runs = looking(cache="disk")

    async def scenario():
        first, second = real(look, tmp_path), real(look, tmp_path)
        results = [await run_one(executor, look, query="a") for executor in (first, second, second)]
        await first.close()
        await second.close()
        return [*results, await run_one(real(look, tmp_path), look, query="a")]

    results = asyncio.run(scenario())
    assert runs == ["a"] and {r.text for r in results} == {"a 1"}
    assert [r.span.cache for r in results] == ["made", "disk", "kept", "disk"]


def test_failures_are_not_stored_and_old_results_not_served(tmp_path):
    look, runs = looking(cache="disk", cache_ttl=100)
    now = [1000.0]

    async def ask(query: str):
        return await run_one(executor_for(look, clock=lambda: now[0], shared=tmp_path), look, query=query)

    async def scenario():
        assert [(await ask("bad")).outcome for _ in range(2)] == [Outcome.TOOL_ERROR] * 2
        texts = [(await ask("a")).text]
        for now[0] in (1099.0, 1101.0, 1102.0):
            texts.append((await ask("a")).text)
        return texts

    assert asyncio.run(scenario()) == ["a 3", "a 3", "a 4", "a 4"] and len(runs) == 4


def test_a_store_that_cannot_be_used_costs_a_run_and_not_the_call(tmp_path):
    look, runs = looking(cache="disk")

    async def scenario():
        first, second = real(look, tmp_path), real(look, tmp_path)
        (path,) = tmp_path.glob("cache-*.sqlite")
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE results")
        return [(await run_one(executor, look, query="a")).text for executor in (first, second)]

    assert asyncio.run(scenario()) == ["a 1", "a 2"] and len(runs) == 2


def test_without_a_run_folder_the_disk_cache_is_in_memory():
    look, runs = looking(cache="disk")
    executor = executor_for(look)
    assert [run_virtual(run_one(executor, look, query="a")).text for _ in range(2)] == ["a 1"] * 2
    assert len(runs) == 1


def test_the_fingerprint_changes_with_whatever_may_change_a_result():
    look, _ = looking()

    async def call(arguments: Any, context: Any) -> str:
        return ""

    def other(**options: Any) -> str:
        return look.with_options(options).fingerprint

    changed = [other(version="2"), other(max_output_tokens=7), other(keep="tail")]
    schemas = [
        schema_tool("a", "A.", {"properties": {"x": {"type": kind}}}, call) for kind in ("string", "integer")
    ]
    assert len({look.fingerprint, *changed}) == 4
    assert schemas[0].fingerprint != schemas[1].fingerprint
    assert look.fingerprint == looking()[0].fingerprint == other(timeout=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "redis"}, "must be true, false or one of memory, disk"),
        ({"cache_ttl": 0}, "cache_ttl = 0 must be above 0"),
        ({"idempotent": False}, "a cache needs idempotent=True"),
    ],
)
def test_cache_options_without_sense_are_refused(options, message):
    with pytest.raises(BadTool, match=message):
        looking()[0].with_options(options)


def test_time_spent_by_another_call_is_not_counted_as_a_run():
    @tool(idempotent=True, cache=True)
    async def slow() -> str:
        """Work."""
        await asyncio.sleep(5)
        return "done"

    async def scenario():
        executor = executor_for(slow)
        await asyncio.gather(*(run_one(executor, slow) for _ in range(3)))
        assert loop_time() == pytest.approx(5)
        return executor.take_metrics()

    metrics = run_virtual(scenario())
    assert (metrics["tool/slow/calls"], metrics["tool/slow/running_max"]) == (3, 1)
    assert metrics["tool/slow/latency_p50_s"] == pytest.approx(5)
