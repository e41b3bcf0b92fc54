"""my_task without a model: does it load, does the tool answer, does right earn more than wrong?"""

import asyncio
from pathlib import Path

from configs.load import load_config
from tasks import Episode, load_task, score
from toolcall import Executor, ToolContext

HERE = Path(__file__).parent
TASK = load_task(load_config(HERE / "my_task.toml").config.task, HERE, seed=0)


def parse(turn: str):
    assert TASK.parser is not None  # the recipe names one; "auto" is known only with a model
    return TASK.parser.parse(turn)


def score_of(*turns: str, row=TASK.train[0]) -> float:
    """What a trajectory earns whose model wrote `turns`; every call in them is run."""

    async def run() -> float:
        executor, context = Executor(TASK.tools), ToolContext(row=row)
        results = [await executor.run(parse(turn), context) for turn in turns]
        episode = Episode(
            row, tuple(TASK.make_messages(row)), turns, tuple(results), "answer", context=context
        )
        scored = await score(TASK.rewards, episode)
        assert scored.reward is not None, scored.error
        return scored.reward

    return asyncio.run(run())


def test_the_tool_answers_and_an_unknown_item_is_explained():
    async def call(item: str):
        (result,) = await Executor(TASK.tools).run(parse(f"<price>{item}</price>"), ToolContext())
        return result

    assert asyncio.run(call("lamp")).text == "25"
    assert "no item 'moon'" in asyncio.run(call("moon")).text


def test_right_earns_more_than_wrong_and_a_call_helps():
    row = {"question": "What does a lamp cost?", "answer": "25"}
    right, wrong = "<answer>25</answer>", "<answer>24</answer>"
    assert score_of("<price>lamp</price>", right, row=row) > score_of(right, row=row)
    assert score_of(right, row=row) > score_of("<price>lamp</price>", wrong, row=row)
