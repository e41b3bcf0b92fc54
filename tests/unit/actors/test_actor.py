"""The rollout role against a fake buffer: leases in, trajectories out, clean ends."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from actors.actor import Actor
from actors.engine import EngineDied
from configs.roles import RoleSpec
from configs.schema import RunConfig
from metrics import names
from tests.fakes import FakeBuffer, FakeWeights
from tests.unit.actors.support import make_lease, make_rollouts

CONFIG = {"buffer": {"heartbeat_s": 0.01, "lease_timeout_s": 1}, "actors": {"max_groups_in_flight": 2}}


def make_actor(
    buffer,
    script=lambda tokenizer: tokenizer.encode("<answer>84</answer><|im_end|>"),
    weights=None,
):
    rollouts, engine, tokenizer = make_rollouts(lambda *_: script(tokenizer))
    spec = RoleSpec(
        role="actor",
        name="actor-0",
        rank=0,
        world=1,
        config=RunConfig.model_validate(CONFIG),
        run_dir=Path("."),
        run_id="r",
        config_dir=Path("."),
        model_path=Path("."),
        num_prompts=1,
        buffer_endpoint="",
        device="cpu",
        threads=1,
    )
    return Actor(rollouts, buffer, weights or FakeWeights(), spec), engine


def leases(count: int, size: int = 2):
    return [replace(make_lease(size), lease_id=f"l{i}", group_id=f"g{i}") for i in range(count)]


def run(actor):
    asyncio.run(asyncio.wait_for(actor.run(), 10))


def test_every_member_of_every_lease_is_put_once():
    buffer = FakeBuffer(leases(5))
    actor, _ = make_actor(buffer)
    run(actor)
    assert sorted(t.trajectory_id for t in buffer.put) == [f"g{g}/{i}" for g in range(5) for i in range(2)]
    assert buffer.returned == [] and buffer.beats[-1].state == "finished"


def test_only_missing_members_are_rolled_out():
    buffer = FakeBuffer([replace(make_lease(4), missing=(1, 3))])
    actor, _ = make_actor(buffer)
    run(actor)
    assert sorted(t.index for t in buffer.put) == [1, 3]


def test_finish_cancels_what_runs_and_hands_its_lease_back():
    buffer = FakeBuffer(leases(1))
    actor, engine = make_actor(buffer)

    async def never(*_):
        buffer.expected = 0  # the learner has trained its last step meanwhile
        await asyncio.Event().wait()

    engine.generate = never
    run(actor)
    assert buffer.returned == ["l0"] and buffer.put == []


def test_drain_finishes_the_leases_it_has_and_takes_no_more():
    buffer = FakeBuffer(leases(4))
    buffer.finish_when_put = False
    actor, engine = make_actor(buffer)
    generate, waiting = engine.generate, asyncio.Event()

    async def gated(*arguments):
        buffer.drain = True
        await waiting.wait()
        return await generate(*arguments)

    async def drive():
        engine.generate = gated
        running = asyncio.create_task(actor.run())
        await buffer.until(lambda: any(beat.state == "draining" for beat in buffer.beats))
        waiting.set()
        await asyncio.wait_for(running, 10)

    asyncio.run(drive())
    assert sorted({t.group_id for t in buffer.put}) == ["g0", "g1"]
    assert len(buffer.leases) == 2 and buffer.returned == []


def test_a_lost_lease_is_given_up():
    buffer = FakeBuffer(leases(1))
    buffer.finish_when_put = False
    actor, engine = make_actor(buffer)
    started = asyncio.Event()

    async def never(*_):
        started.set()
        await asyncio.Event().wait()

    async def drive():
        engine.generate = never
        running = asyncio.create_task(actor.run())
        await started.wait()
        buffer.lost = ("l0",)
        await buffer.until(lambda: not buffer.beats[-1].lease_ids)
        buffer.drain = True
        await asyncio.wait_for(running, 10)

    asyncio.run(drive())
    assert buffer.put == [] and buffer.returned == []


def test_all_turns_of_a_group_share_the_cache_salt_of_its_start():
    """Or a turn after a weight update would prefill its whole trajectory again."""
    weights = FakeWeights()
    weights.cache_salt = "v1"
    turns = iter(["<calc>12*7</calc><|im_end|>"] * 2 + ["<answer>84</answer><|im_end|>"] * 2)
    actor, engine = make_actor(
        FakeBuffer(leases(1)), lambda tokenizer: tokenizer.encode(next(turns)), weights
    )
    generate = engine.generate

    async def generate_and_update(*arguments):
        sampled = await generate(*arguments)
        weights.cache_salt = "v2"
        return sampled

    engine.generate = generate_and_update
    run(actor)
    assert [sampling.cache_salt for _, sampling, _ in engine.requests] == ["v1"] * 4


def test_m7_a_dead_engine_ends_the_actor_with_its_cause():
    def dies(_):
        raise EngineDied("vLLM's engine process ended")

    actor, _ = make_actor(FakeBuffer(leases(2)), dies)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(actor)
    assert any(isinstance(error, EngineDied) for error in caught.value.exceptions)


def test_heartbeats_report_what_was_done():
    buffer = FakeBuffer(leases(2))
    actor, _ = make_actor(buffer)
    run(actor)
    total = {
        name: sum(beat.metrics.get(name, 0) for beat in buffer.beats)
        for name in (names.ACTOR_TRAJECTORIES, names.ACTOR_SUCCESS, names.ACTOR_REWARD_SUM)
    }
    assert set(total.values()) == {4}
