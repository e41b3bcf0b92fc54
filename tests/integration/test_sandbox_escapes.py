"""Every escape attempt of the benchmark's table, really made, must be held."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.sandbox_attempts import ATTEMPTS
from benchmarks.sandbox_escapes import LIMITS, Row, host, make_attempt
from toolcall.sandbox import Sandbox, SandboxUnavailable


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        sandbox = Sandbox(LIMITS)
        try:
            runner.run(sandbox.start())
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        yield runner, sandbox
        runner.run(sandbox.close())


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_the_sandbox_holds(runner, attempt):
    loop, sandbox = runner
    with host() as (facts, server):
        row: Row = loop.run(make_attempt(sandbox, attempt, facts, server))
    assert not row.problems, row.result
