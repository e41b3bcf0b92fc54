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
from tasks import Reward, reward
from tasks.mixture import Mixture, Part
from tests.fakes import FakeBuffer, FakeWeights
from tests.unit.actors.support import correct, make_lease, make_rollouts, make_task
from tests.unit.actors.test_tool_pause import FakeTools

CONFIG = {
    "buffer": {"heartbeat_s": 0.01, "lease_timeout_s": 1},
    "actors": {"max_groups_in_flight": 2, "group_size": 2},
}


def make_actor(
    buffer,
    script=lambda tokenizer: tokenizer.encode("<answer>84</answer><|im_end|>"),
    weights=None,
    **task,
):
    rollouts, engine, tokenizer = make_rollouts(lambda *_: script(tokenizer), task=make_task(**task))
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
    pick = Mixture((Part(rollouts.task, rollouts.limits, Path(), share=1),)).pick
    return Actor([rollouts], pick, buffer, weights or FakeWeights(), spec), engine


def leases(count: int, size: int = 2):
    return [replace(make_lease(size), lease_id=f"l{i}", group_id=f"g{i}") for i in range(count)]


def run(actor):
    async def drive():
        async with asyncio.timeout(10) as deadline:
            try:
                await actor.run()
            finally:
                assert not deadline.expired()

    asyncio.run(drive())


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


@reward(weight=0.5)
def first_is_best(group) -> list[float]:
    return [float(place == 0) for place in range(len(group))]


def test_a_reward_that_sees_the_group_is_asked_when_all_have_ended():
    buffer = FakeBuffer(leases(2, size=3))
    actor, _ = make_actor(buffer, rewards=[Reward("correct", correct), first_is_best])
    run(actor)
    rewards = {t.trajectory_id: t.reward for t in buffer.put}
    assert rewards == {f"g{g}/{i}": 1.5 if i == 0 else 1.0 for g in range(2) for i in range(3)}
    assert buffer.put[0].reward_components == {"correct": 1.0, "first_is_best": 1.0}


def test_what_is_left_of_a_dead_actors_group_is_not_compared():
    buffer = FakeBuffer([replace(make_lease(4), missing=(1, 3))])
    actor, _ = make_actor(buffer, rewards=[Reward("correct", correct), first_is_best])
    run(actor)
    assert [(t.index, t.reward, t.reward_components) for t in buffer.put] == [
        (1, None, {"correct": 1.0}),
        (3, None, {"correct": 1.0}),
    ]
    assert "an actor died" in buffer.put[0].error


def test_groups_that_wait_for_a_reward_do_not_keep_the_engine_from_others():
    """max_groups_in_flight is 2, and no reward comes before all five groups have been rolled out."""
    all_rolled, asked = asyncio.Event(), []

    async def slow_judge(episode) -> float:
        asked.append(episode)
        if len(asked) == 10:
            all_rolled.set()
        await all_rolled.wait()
        return 1.0

    buffer = FakeBuffer(leases(5))
    actor, _ = make_actor(buffer, rewards=[Reward("judge", slow_judge)])
    run(actor)
    assert len(buffer.put) == 10


def test_r3_unscored_trajectories_are_counted_and_the_reason_is_logged_but_not_a_flood(caplog):
    def judge() -> float:
        raise ConnectionError("judge is down")

    buffer = FakeBuffer(leases(5))
    actor, _ = make_actor(buffer, rewards=[Reward("correct", correct), Reward("judge", judge)])
    run(actor)
    assert all(t.reward is None and "judge is down" in t.error for t in buffer.put)
    assert sum(beat.metrics.get(names.ACTOR_ERRORS, 0) for beat in buffer.beats) == 10
    assert sum(beat.metrics.get("reward/correct_count", 0) for beat in buffer.beats) == 10
    assert sum(beat.metrics.get("task/sums/scored", 0) for beat in buffer.beats) == 0
    said = [record for record in caplog.records if "judge is down" in record.getMessage()]
    assert len(said) == 4  # at 1, 2, 4 and 8


def test_no_group_is_leased_while_a_tool_is_down_and_the_run_ends_balanced():
    buffer = FakeBuffer(leases(3))
    actor, _ = make_actor(buffer)
    tools = FakeTools()
    tools.gone = {"search": "search is unavailable (refused)"}
    actor._tools._tools = tools

    async def drive():
        running = asyncio.create_task(actor.run())
        await buffer.until(lambda: any(beat.state.startswith("paused: search") for beat in buffer.beats))
        assert len(buffer.leases) == 3 and buffer.put == []
        tools.gone = {}
        async with asyncio.timeout(10):
            await running

    asyncio.run(drive())
    assert len(buffer.put) == 6 and buffer.leases == [] and buffer.returned == []
    assert any(beat.metrics[names.ACTOR_TOOL_PAUSED_S] > 0 for beat in buffer.beats)


def test_each_task_of_a_mixture_has_its_own_tools_syntax_and_rewards():
    """Two tasks on one engine: the lease's prompt says which."""
    tag, hermes = make_task(name="tag"), make_task("hermes", name="hermes")
    answer = lambda tokenizer: tokenizer.encode("<answer>84</answer><|im_end|>")  # noqa: E731
    buffer = FakeBuffer([replace(lease, prompt_index=n) for n, lease in enumerate(leases(2))])
    actor, engine = make_actor(buffer, answer)
    rollouts = []
    for task in (tag, hermes):
        made, _, _ = make_rollouts([], task=task)
        rollouts.append(replace(made, engine=engine))
    mixture = Mixture(tuple(Part(each.task, each.limits, Path(), share=1) for each in rollouts))
    actor._rollouts, actor._pick = rollouts, mixture.pick
    run(actor)
    assert {(t.prompt_index, t.task) for t in buffer.put} == {(0, "tag"), (1, "hermes")}
    counted = {name for beat in buffer.beats for name in beat.metrics if name.endswith("/success")}
    assert {"task/tag/success", "task/hermes/success"} <= counted


def test_a_held_out_prompt_is_sampled_greedily_and_is_no_part_of_the_training_metrics():
    train, held_out = leases(2, size=1)
    buffer = FakeBuffer([train, replace(held_out, kind="eval", prompt_index=1)])
    actor, engine = make_actor(buffer)
    row = {"question": "6 times 14?", "answer": "84"}
    actor._held_out = [(0, {}), (0, row)]
    run(actor)
    sampled = {request.split("/")[0]: sampling for _, sampling, request in engine.requests}
    assert (sampled["g0"].temperature, sampled["g0"].logprobs) == (0.7, True)
    assert (sampled["g1"].temperature, sampled["g1"].logprobs) == (0.0, False)
    put = {t.group_id: t for t in buffer.put}
    assert put["g1"].reward == 1.0 and put["g1"].metrics["success"] == 1.0
    assert sum(beat.metrics.get(names.ACTOR_TRAJECTORIES, 0) for beat in buffer.beats) == 1
