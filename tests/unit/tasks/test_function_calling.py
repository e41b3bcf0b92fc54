"""The function_calling task: call equality, its rows from files and from the package, and one episode."""

import asyncio
import json
from pathlib import Path

import pytest

from actors.agent_loop import run_episode
from configs.load import load_config
from configs.schema import TaskConfig
from tasks import load_task
from tasks.call_equality import BadAnswer, calls_match, wanted_calls
from tasks.readers import BadData
from tasks.row_tools import RowTools
from tests.unit.actors.support import make_lease, make_rollouts
from toolcall import ToolCall

FUNCTION = {
    "name": "shop.order",
    "description": "Order.",
    "parameters": {
        "type": "dict",
        "properties": {
            "item": {"type": "string"},
            "count": {"type": "integer"},
            "price": {"type": "float"},
            "gift": {"type": "boolean", "default": False},
            "to": {"type": "dict", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["item"],
    },
}
TRUTH = {
    "item": ["hat", "red hat"],
    "count": [1, ""],
    "price": [2.0, ""],
    "gift": [False],
    "to": [{"city": ["Oslo"], "zip": ["0150", ""]}, ""],
    "tags": [["a", "b"], ""],
}
ROWS = [
    {"id": "a", "question": [[{"role": "user", "content": "Order a hat."}]], "function": [FUNCTION]},
    {"id": "b", "question": "Order a hat and a cap.", "function": [FUNCTION]},
]
ANSWERS = [
    {"id": "a", "ground_truth": [{"shop.order": TRUTH}]},
    {
        "id": "b",
        "ground_truth": [
            {"name": "shop.order", "arguments": {"item": "hat", "gift": False}},
            {"name": "shop.order", "arguments": {"item": "cap", "gift": False}},
        ],
    },
]
TOOLS = {tool.name: tool for tool in RowTools("function", ())(ROWS[0])}


def order(**arguments):
    return ToolCall("", "shop_order", arguments)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"item": "hat"}, True),  # what is optional may be absent, a default may be left to itself
        ({"item": "Red-Hat"}, True),
        ({"item": "blue hat"}, False),
        ({}, False),  # what is required may not
        ({"item": "hat", "count": 1, "price": 2, "gift": False}, True),  # 2 is 2.0
        ({"item": "hat", "count": "1"}, True),  # as the function would have got it
        ({"item": "hat", "count": 2}, False),
        ({"item": "hat", "count": True}, False),
        ({"item": "hat", "gift": True}, False),
        ({"item": "hat", "colour": "red"}, False),
        ({"item": "hat", "to": {"city": "oslo"}}, True),
        ({"item": "hat", "to": {"city": "Oslo", "zip": "0150"}}, True),
        ({"item": "hat", "to": {"city": "Oslo", "zip": "1"}}, False),
        ({"item": "hat", "to": {"zip": "0150"}}, False),
        ({"item": "hat", "to": {"city": "Oslo", "street": "x"}}, False),
        ({"item": "hat", "tags": ["a", "b"]}, True),
        ({"item": "hat", "tags": ["b", "a"]}, False),
        ({"item": "hat", "tags": ["a"]}, False),
    ],
)
def test_a_call_is_equal_as_its_schema_sees_it(arguments, right):
    wanted = wanted_calls(ANSWERS[0]["ground_truth"])
    assert calls_match([order(**arguments)], wanted, TOOLS) is right


def test_calls_of_a_turn_match_in_any_order_each_once():
    wanted = wanted_calls(json.dumps(ANSWERS[1]["ground_truth"]))
    hat, cap = order(item="hat"), order(item="cap")
    assert calls_match([cap, hat], wanted, TOOLS) and calls_match([hat, cap], wanted, TOOLS)
    assert not calls_match([hat, hat], wanted, TOOLS)
    assert not calls_match([hat], wanted, TOOLS) and not calls_match([hat, cap, hat], wanted, TOOLS)
    assert not calls_match([hat, ToolCall("", "shop.cancel", {})], wanted, TOOLS)
    assert calls_match([], [], TOOLS) and not calls_match([hat], [], TOOLS)
    greedy = wanted_calls([{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}])  # the first must leave 1 to the second
    f = {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}
    tools = {tool.name: tool for tool in RowTools("function", ())({"function": [f]})}
    assert calls_match([ToolCall("", "f", {"x": 1}), ToolCall("", "f", {"x": 2})], greedy, tools)


def test_what_parquet_adds_to_an_answer_is_not_asked_for():
    (wanted,) = wanted_calls([{"f": {"x": [1], "y": None}, "g": None}])
    assert (wanted.name, wanted.arguments) == ("f", {"x": [1]})


@pytest.mark.parametrize("truth", ["[", {"f": {}}, [3], [{"f": 1}], [{"f": {"x": 1}}], [{"f": {}, "g": {}}]])
def test_an_answer_that_says_nothing_is_refused(truth):
    with pytest.raises(BadAnswer):
        wanted_calls(truth)


def load(folder, rows=ROWS, answers=ANSWERS, **options):
    for name, content in (("rows.json", rows), ("answers.jsonl", answers)):
        (folder / name).write_text("\n".join(map(json.dumps, content)))
    options = {"file": "rows.json", "held_out": 0.0, "shots": 0, **options}
    options["answers"] = "answers.jsonl" if answers else ""
    return load_task(TaskConfig(name="function_calling", options=options), folder, seed=0)


def rolled(task, row, turn):
    limits = {"task": task, "max_turns": 1, "max_trajectory_tokens": 8000, "max_tokens_per_turn": 1000}
    rollouts, engine, tokenizer = make_rollouts([f"{turn}<|im_end|>"], **limits)
    finished = asyncio.run(run_episode(rollouts, make_lease(), 0, row))
    return finished, tokenizer.decode(engine.requests[0][0])


def written(**arguments):
    call = {"name": "shop_order", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_one_episode_is_scored_by_its_calls(tmp_path):
    task = load(tmp_path)
    row = next(row for row in task.train if row["id"] == "b")
    right, prompt = rolled(task, row, written(item="cap") + written(item="hat"))
    assert right.success and right.trajectory.reward == pytest.approx(1.1)
    assert '"name": "shop_order"' in prompt and "Order a hat and a cap." in prompt
    half, _ = rolled(task, row, written(item="cap") + written(count=2))
    assert not half.success and half.trajectory.reward_components == {"call_match": 0.0, "valid_calls": 0.5}
    broken, _ = rolled(task, row, written(item="cap") + written(item="hat") + "<tool_call>\n{]")
    assert not broken.success
    silent, _ = rolled(task, row, "I cannot.")
    assert silent.trajectory.reward == 0.0


def test_no_call_is_right_where_the_row_asks_for_none(tmp_path):
    task = load(tmp_path, [{**ROWS[0], "ground_truth": []}], ())
    assert rolled(task, task.train[0], "None of these helps.")[0].success
    assert not rolled(task, task.train[0], written(item="hat"))[0].success


@pytest.mark.parametrize(
    ("rows", "answers", "says"),
    [
        (ROWS, ANSWERS[:1], r"rows.json line 2: no ground_truth \(id 'b'\)"),
        ([ROWS[0], {**ROWS[1], "question": 3}], ANSWERS, "rows.json line 2: question must be a text"),
        ([{**ROWS[0], "question": [[], []]}], ANSWERS, "line 1: question has 2 user turns"),
        ([{**ROWS[0], "question": [[{"role": "user"}]]}], ANSWERS, "line 1: question must be a text"),
        ([{**ROWS[0], "function": [{"name": ""}]}], ANSWERS, "line 1: function: tool name '' must be"),
        (ROWS[:1], [{"id": "a", "ground_truth": [{"f": 1}]}], 'line 1: ground_truth: {"f": 1} is no call'),
        (ROWS[:1], [{"id": "a", "ground_truth": [{"f": {}}]}], "line 1: .*calls 'f', which function lacks"),
    ],
)
def test_rows_that_cannot_be_used_are_errors_that_name_file_and_line(tmp_path, rows, answers, says):
    with pytest.raises(BadData, match=says):
        load(tmp_path, rows, answers)


def test_the_recipe_has_the_packages_rows_apart_by_question():
    pytest.importorskip("bfcl_eval")
    loaded = load_config(Path("configs/function_calling_cpu.toml"))
    task = load_task(loaded.config.task, loaded.config_dir, seed=0)
    assert len(task.train) > 350 and len(task.held_out) > 100
    assert not {row["id"] for row in task.train} & {row["id"] for row in task.held_out}
    messages = task.make_messages(task.train[0])
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"] and messages[-1][
        "role"
    ] == "user"


def test_a_category_that_is_none_is_refused():
    with pytest.raises(ValueError, match="categories has 'easy'; choose of: simple"):
        load_task(TaskConfig(name="function_calling", options={"categories": ["easy"]}), Path(), seed=0)
