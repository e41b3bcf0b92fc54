"""The evaluator: the same loop as training, resumable, several samples a prompt."""

import asyncio

import pytest

from actors.engine import EngineDied
from actors.evaluation_tables import tables
from actors.evaluator import draws, evaluate, roll_with
from actors.samples import SampleFile, difference, summarise
from configs.schema import RunConfig
from tasks import reward
from tests.unit.actors.support import make_rollouts, make_task

ROWS = [{"question": "12 times 7?", "answer": "84"}, {"question": "9 + 9?", "answer": "84"}]
CONFIG = RunConfig.model_validate({"eval": {"samples": 2, "seeds": [0, 1]}, "actors": {"temperature": 0.7}})


def rolled(path, rewards=None, engine_of=lambda engine: engine):
    """Evaluate both rows with a model that answers 84 to the first only; the samples and the engine."""
    right, wrong = "<answer>84</answer><|im_end|>", "<answer>83</answer><|im_end|>"
    task = make_task(**({"rewards": rewards} if rewards else {}))
    rollouts, engine, tokenizer = make_rollouts([], task=task)
    engine._script = lambda prompt, *_: tokenizer.encode(right if "12" in tokenizer.decode(prompt) else wrong)
    file = SampleFile(path, {"task": "sums"})
    wanted = list(draws(CONFIG, ROWS))
    try:
        roll = engine_of(roll_with([rollouts]))
        return asyncio.run(evaluate([task], wanted, roll, file, concurrency=3)), engine
    finally:
        file.close()


def test_each_prompt_is_decoded_greedily_once_and_sampled_for_each_seed(tmp_path):
    samples, engine = rolled(tmp_path / "x.jsonl")
    assert [s.decoding for s in samples] == ["greedy"] * 2 + ["sampled"] * 8
    assert all(not sampling.logprobs for _, sampling, _ in engine.requests)
    seeds = [sampling.seed for _, sampling, _ in engine.requests if sampling.temperature > 0]
    assert len(set(seeds)) == 8 and None not in seeds
    assert {s.seed for _, s, _ in engine.requests if s.temperature == 0} == {None}
    found = summarise(s for s in samples if s.decoding == "sampled")
    assert (found["success"], found["n"], found["samples"]) == (0.5, 2, 8)


def test_a_stopped_evaluation_goes_on_where_it_was(tmp_path):
    """The second run draws only what the first has not written, and the same as one run would have."""
    whole, _ = rolled(tmp_path / "whole.jsonl")

    def breaks(roll):
        async def roll_four(draw, lease, number):
            if draw.decoding == "sampled" and draw.seed == 1:
                raise EngineDied
            return await roll(draw, lease, number)

        return roll_four

    with pytest.raises(EngineDied):
        rolled(tmp_path / "x.jsonl", engine_of=breaks)
    samples, engine = rolled(tmp_path / "x.jsonl")
    assert samples == whole and 0 < len(engine.requests) < 10


@reward
def rank(group) -> list[float]:
    return [float(place) for place in range(len(group))]


def test_rewards_that_see_the_group_compare_the_samples_of_one_prompt_and_seed(tmp_path):
    samples, _ = rolled(tmp_path / "x.jsonl", rewards=[rank])
    assert [s.components["rank"] for s in samples if s.decoding == "sampled"] == [0.0, 1.0] * 4


def test_the_result_is_shown_with_intervals_components_and_the_difference(tmp_path):
    samples, _ = rolled(tmp_path / "x.jsonl")
    result = {
        "task": "sums",
        "model": "m",
        "judge": {"judge/calls": 3.0},
        "against": {"file": "b.jsonl", **difference(samples, samples)},
    }
    for decoding in ("greedy", "sampled"):
        result[decoding] = summarise(s for s in samples if s.decoding == decoding) | {"temperature": 0.7}
    assert [len(table.columns) for table in tables(result)] == [6, 3, 2, 4]
