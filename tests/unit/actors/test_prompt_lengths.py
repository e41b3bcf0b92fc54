"""Prompts that leave no room to answer."""

from actors.prompt_lengths import too_long
from tasks.loading import without_prompts
from tests.unit.actors.support import make_rollouts, make_task
from toolcall import schema_tool


def test_prompts_that_leave_no_room_are_found_whatever_their_bytes():
    """Bytes bound tokens from above: a long row of few tokens must be tokenised, not refused."""
    questions = ["short", "7 " * 200, "x", " the" * 40, "é" * 90]
    task = make_task(train=[{"question": question} for question in questions])
    rollouts, *_ = make_rollouts([], task=task)
    lengths = [len(rollouts.renderer.prompt(task.make_messages(row))) for row in task.train]
    limit = sorted(lengths)[-3]
    found = too_long(task, rollouts.renderer, limit + 8)
    assert found == [index for index, length in enumerate(lengths) if length > limit] and len(found) == 2
    left = without_prompts(task, found)
    assert [row["question"] for row in left.train] == [q for i, q in enumerate(questions) if i not in found]
    assert without_prompts(task, ()) is task


def test_a_row_whose_own_tools_leave_no_room_is_found():
    def offered(row):
        return [schema_tool(name, "W", {}, not_called) for name in row["tools"]]

    rows = [{"question": "q", "tools": ["a"]}, {"question": "q", "tools": ["a", "b" * 60]}]
    task = make_task("hermes", tools=(), train=rows, tools_in_prompt=False, offered=offered)
    rollouts, *_ = make_rollouts([], task=task)
    short = len(rollouts.of_row(rows[0]).renderer.prompt(task.make_messages(rows[0])))
    assert too_long(task, rollouts.renderer, short + 8) == [1]


async def not_called(arguments, context):
    raise AssertionError
