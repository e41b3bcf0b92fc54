"""The evaluator: the same loop as training, resumable, several samples a prompt."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from actors.engine import EngineDied
from actors.evaluation_tables import tables
from actors.evaluator import _facts, draws, evaluate, refuse_other_prompts, roll_with
from actors.samples import BadSamples, SampleFile, difference, read_samples, summarise
from configs.schema import RunConfig, TaskConfig
from tasks import Reward, reward
from tasks.mixture import Mixture, Part
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


def test_r3_what_an_outage_left_unscored_is_tried_again(tmp_path):
    def judge() -> float:
        raise ConnectionError("judge is down")

    broken, _ = rolled(tmp_path / "x.jsonl", rewards=[Reward("judge", judge)])
    assert all(sample.error for sample in broken)
    samples, engine = rolled(tmp_path / "x.jsonl", rewards=[Reward("judge", lambda: 1.0)])
    assert len(engine.requests) == 10 and not any(sample.error for sample in samples)
    assert len(read_samples(tmp_path / "x.jsonl")) == 10


def test_samples_of_other_data_are_not_gone_on_with(tmp_path):
    rolled(tmp_path / "x.jsonl")
    file = SampleFile(tmp_path / "x.jsonl", {"task": "sums"})
    task, wanted = make_task(), list(draws(CONFIG, ROWS))
    refuse_other_prompts([task], wanted, file)
    with pytest.raises(BadSamples, match=r"held-out prompt 0 of .* was another"):
        refuse_other_prompts([task], list(draws(CONFIG, ROWS[::-1])), file)
    file.close()


def test_other_rewards_are_another_evaluation(tmp_path):
    def facts(**limits):
        part = Part(make_task(), TaskConfig(**limits), Path())
        return _facts(CONFIG, Mixture((part,)), "http://host/v1")

    SampleFile(tmp_path / "x.jsonl", facts(rewards=["a:b"])).close()
    SampleFile(tmp_path / "x.jsonl", facts(rewards=["a:b"], trajectory_timeout_s=9)).close()
    with pytest.raises(BadSamples, match=r"its sums: task\.rewards was \['a:b'\], now it is \['a:c'\]"):
        SampleFile(tmp_path / "x.jsonl", facts(rewards=["a:c"]))
    with pytest.raises(BadSamples, match=r"rewards was \['a:b'\], now it is 'not set'"):
        SampleFile(tmp_path / "x.jsonl", facts())


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


def test_why_samples_are_unscored_is_shown_and_an_evaluation_without_scores_has_no_number(tmp_path):
    samples, _ = rolled(tmp_path / "x.jsonl")
    why = "endpoint: APIConnectionError: refused; [/INST] [b]"  # a model's words may look like markup
    down = [replace(sample, error=why) for sample in samples]
    result = {"task": "sums", "model": "m"}
    for decoding in ("greedy", "sampled"):
        part = summarise(s for s in down if s.decoding == decoding)
        result[decoding] = part | {"temperature": 0.7}
    screen = Console(file=io.StringIO(), width=120)
    for table in tables(result):
        screen.print(table)
    shown = screen.file.getvalue()
    assert "unscored: 8" in shown and "APIConnectionError: refused; [/INST] [b]" in shown
    assert "8 samples, none scored" in shown
    assert "nothing scored" in shown and "nan" not in shown
