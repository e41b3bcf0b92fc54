"""Prompts that leave no room to answer."""

from actors.prompt_lengths import too_long
from tasks.loading import without_prompts
from tests.unit.actors.support import make_rollouts, make_task


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
