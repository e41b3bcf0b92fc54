"""`benchmarks/rollout.py` over a fake engine: what it measures, not how fast anything is."""

import asyncio

import pytest

from benchmarks.rollout import TURNS, DrawnLengths, Latency, Loop
from benchmarks.rollout_alone import Playing, Script
from configs.schema import RunConfig
from tests.fakes import FakeEngine
from tests.tiny import tiny_tokenizer

CONFIG = RunConfig.model_validate({"task": {"max_turns": TURNS}})


def make() -> tuple[DrawnLengths, Loop]:
    engine = FakeEngine(lambda _ids, sampling, _request: [7] * sampling.max_tokens)
    drawn = DrawnLengths(engine)
    return drawn, Loop(CONFIG, drawn, tiny_tokenizer())


def test_refilled_episodes_are_measured_after_a_warm_up_and_leave_scripts_to_repeat():
    drawn, loop = make()
    run = asyncio.run(loop.refilled(None, 2, 0.0))  # the first turn after the warm-up ends the window
    assert run.tokens > 0 and run.seconds > 0
    asked = {tuple(prompt): sampled for turns in drawn.asked.values() for prompt, sampled in turns.values()}
    assert len(drawn.scripts()) >= 2
    for script in drawn.scripts():
        playing = Playing(script)
        for turn, length in enumerate(script.lengths, start=1):
            assert asked[tuple(playing.ids)] == length == playing.length
            assert playing.go_on([7] * length) == (turn < TURNS)


def test_in_lock_step_every_turn_waits_for_the_slowest_tool():
    _, loop = make()
    latency = Latency(0.001)
    run, serial = asyncio.run(loop.in_lock_step(latency, 3))
    assert len(latency.drawn) == 3 * (TURNS - 1)  # the call of the last turn is not executed
    first, second = latency.drawn[:3], latency.drawn[3:]
    assert serial.seconds - run.seconds == pytest.approx(sum(latency.drawn) - max(first) - max(second))
    assert serial.tokens == run.tokens


def test_a_script_is_over_after_its_last_turn():
    playing = Playing(Script([1, 2], [1, 1], [[9]]))
    assert playing.go_on([3]) and playing.ids == [1, 2, 3, 9]
    assert not playing.go_on([4])
