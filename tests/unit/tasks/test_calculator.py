"""The calculator task: its problems, its prompt, its rewards."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from actors.worked_examples import in_one_turn
from configs.schema import TaskConfig
from tasks import load_task, score
from tasks.calculator import SHOTS
from tasks.word_problems import STEPS, WordProblems, is_held_out, make_problem
from tests.unit.tasks.support import episode, result
from toolcall import Executor, Outcome, ToolContext
from toolcall.tools.calculator import evaluate, show
from toolcall.types import ParsedTurn, ToolCall

CALL = "<calc>12*7</calc>"
RIGHT, WRONG = "\n<answer>84</answer>", "\n<answer>85</answer>"


def calculator_task(seed=0, **options):
    return load_task(TaskConfig(options=options), Path(), seed)


def reward_of(made, **options):
    scored = asyncio.run(score(calculator_task(**options).rewards, made))
    assert scored.error is None
    return pytest.approx(scored.reward)


# --- problems ---------------------------------------------------------------------------------------------


def test_problems_are_the_same_in_any_order_and_differ_by_seed():
    first, second = WordProblems(50, 1, held_out=False), WordProblems(50, 1, held_out=False)
    backwards = [second[i] for i in reversed(range(50))]
    assert list(first) == backwards[::-1] == first[0:50]
    assert list(WordProblems(50, 2, held_out=False)) != list(first)
    assert first[-1] == first[49]
    with pytest.raises(IndexError):
        first[50]


def test_a_seeds_first_problem_does_not_change_between_versions():
    """Results of two runs compare only if their problems are the same."""
    assert WordProblems(1, 0, held_out=True)[0] == {
        "question": "Henry had 186 stickers, kept 36 and split the rest equally among 5 friends. "
        "How many did each friend get?",
        "answer": "30",
        "expression": "(186-36)/5",
        "operations": 2,
    }


def test_train_and_held_out_never_share_a_problem_whatever_the_seed():
    train = {row["question"] for seed in (0, 1) for row in WordProblems(1500, seed, held_out=False)}
    held = {row["question"] for row in calculator_task(seed=5, held_out_size=500).held_out}
    assert not train & held and len(held) > 480
    assert list(calculator_task(seed=6).held_out[:20]) == list(calculator_task(seed=7).held_out[:20])
    assert len(calculator_task().train) == 20_000 and len(calculator_task().held_out) == 1_000


def test_every_wording_has_an_integer_answer_above_zero_and_all_its_numbers():
    for structure in (structure for structures in STEPS for structure in structures):
        for draw in range(60):
            numbers = structure.draw(random.Random(draw))
            assert all(number >= 1 for number in numbers.values()), structure.expression
            value = evaluate("".join(str(numbers.get(char, char)) for char in structure.expression))
            assert value.denominator == 1 and value >= 1, (structure.expression, numbers)
        for text in structure.texts:
            assert all(f"{{{letter}}}" in text for letter in numbers)


def test_problems_vary_in_steps_wordings_and_structures():
    rng = random.Random(0)
    rows = [make_problem(rng) for _ in range(2000)]
    counts = {steps: sum(row["operations"] == steps for row in rows) for steps in (1, 2, 3)}
    assert 900 < counts[1] < 1100 and 500 < counts[2] < 700 and 300 < counts[3] < 500
    assert sum(len(structure.texts) for structures in STEPS for structure in structures) >= 25
    assert all(show(evaluate(row["expression"])) == row["answer"] for row in rows)


def test_worked_examples_are_right_and_of_one_to_three_steps():
    assert all(show(evaluate(shot.expression)) == shot.answer for shot in SHOTS)
    assert {sum(shot.expression.count(sign) for sign in "+-*/") for shot in SHOTS} == {1, 2, 3}


def test_the_split_share_is_near_what_it_says():
    rng = random.Random(0)
    assert 0.09 < sum(is_held_out(make_problem(rng)["question"]) for _ in range(2000)) / 2000 < 0.16


# --- prompts ------------------------------------------------------------------------------------------------


def test_examples_are_messages_that_any_syntax_can_show():
    messages = calculator_task().make_messages({"question": "Q?"})
    assert [m["role"] for m in messages] == [
        "system",
        *["user", "assistant", "tool", "assistant"] * 4,
        "user",
    ]
    (call,) = messages[2]["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": {"expression": "3*15+4*8"}}
    assert (messages[3]["content"], messages[4]["content"]) == ("77", "<answer>77</answer>")
    assert messages[-1]["content"] == "Q?"


def test_the_tag_form_shows_an_example_as_one_turn_with_line_breaks_between_tags():
    task = calculator_task(shots=1)
    _, _, turn, _ = in_one_turn(task.make_messages({"question": "Q?"}), task.parser)
    text = "<calc>3*15+4*8</calc>\n<result>77</result>\n<answer>77</answer>"
    assert turn == {"role": "assistant", "content": text}


@pytest.mark.parametrize("syntax", ["tag", "hermes"])
@pytest.mark.parametrize("shots", [0, 4])
def test_the_prompt_itself_names_the_tool(syntax, shots):
    task = calculator_task(syntax=syntax, shots=shots)
    assert task.tools_in_prompt
    named = task.parser.offered_as("calculator")
    assert named in task.make_messages({"question": "Q?"})[0]["content"]


# --- rewards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "reward", "success"),
    [
        (episode((CALL, result()), RIGHT), 1.2, True),
        (episode("<answer>84</answer>"), 1.1, False),
        (episode((CALL, result()), (CALL, result()), RIGHT), 1.1, True),
        (episode(("<calc>84</calc>", result()), RIGHT), 1.0, False),
        (episode(("<calc>-84</calc>", result()), RIGHT), 1.0, False),
        (episode(("<calc>1/0</calc>", result("division by zero", Outcome.TOOL_ERROR)), RIGHT), 1.0, False),
        (episode((CALL, result()), WRONG), 0.2, False),
        (episode((CALL, result())), 0.2, False),
        (episode("I do not know."), 0.1, False),
        (episode((CALL, result()), "\n<answer>83 84 85</answer>"), 0.2, False),
        (episode((CALL, result("<answer>84</answer>")), "\nDone."), 0.2, False),
    ],
)
def test_rewards_and_success(made, reward, success):
    assert reward_of(made) == reward
    assert calculator_task().success(made) is success


def test_no_wrong_episode_comes_near_a_right_one():
    weights = [reward.weight for reward in calculator_task().rewards]
    best_wrong = sum(weight for weight in weights[1:] if weight > 0)
    worst_right = weights[0] + sum(weight for weight in weights[1:] if weight < 0)
    assert worst_right - best_wrong >= 0.5


def test_hermes_calls_are_rewarded_alike():
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>'
    made = episode((text, result()), "<answer>84</answer>")
    assert reward_of(made, syntax="hermes") == 1.2


def test_a_worked_example_played_through_the_real_parts_succeeds():
    task = calculator_task()
    row = task.train[0]
    parsed = task.parser.parse(f"<calc>{row['expression']}</calc>")
    results = asyncio.run(Executor(task.tools).run(parsed, ToolContext()))
    assert task.parser.render_result(results[0]) == f"\n<result>{row['answer']}</result>\n"
    made = episode(
        (f"<calc>{row['expression']}</calc>", *results), f"<answer>{row['answer']}</answer>", **row
    )
    assert reward_of(made) == 1.2 and task.success(made)


def test_the_syntax_may_be_left_to_the_chat_template():
    task = calculator_task(syntax="auto")
    assert task.parser is None and not task.tools_in_prompt
    call = ToolCall("call_0", "calculator", {"expression": "12*7"})
    made = replace(
        episode(("a call", result("84")), RIGHT), parsed=(ParsedTurn((call,)), ParsedTurn((), RIGHT))
    )
    scored = asyncio.run(score(task.rewards, made))
    assert scored.reward == pytest.approx(1.2)
