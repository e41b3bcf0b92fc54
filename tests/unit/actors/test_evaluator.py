"""The evaluator: intervals, and the same loop as training."""

import asyncio

import pytest

from actors.evaluator import evaluate, measure, wilson_interval
from tests.unit.actors.support import make_rollouts


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (102, 256, 0.3404, 0.4596)],
)
def test_wilson_interval(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-3)


def test_success_is_measured_over_rows_in_order():
    right, wrong = "<answer>84</answer><|im_end|>", "<answer>83</answer><|im_end|>"
    rollouts, engine, tokenizer = make_rollouts([])
    engine._script = lambda prompt, *_: tokenizer.encode(right if "12" in tokenizer.decode(prompt) else wrong)
    rows = [{"question": "12 times 7?", "answer": "84"}, {"question": "9 + 9?", "answer": "84"}]
    finished = asyncio.run(evaluate(rollouts, rows, 0.0, concurrency=1))
    assert [item.success for item in finished] == [True, False]
    assert all(not sampling.logprobs for _, sampling, _ in engine.requests)
    result = measure(finished)
    assert (result.success, result.n, result.reward_mean) == (0.5, 2, 0.5)
