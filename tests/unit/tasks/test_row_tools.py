"""Tools per row: which a row offers, what is refused at loading, and what a call of another one gets."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.agent_loop import run_episode
from configs.schema import TaskConfig
from tasks import load_task
from tasks.readers import BadData
from tests.unit.actors.support import make_lease, make_rollouts
from toolcall import Executor, Outcome, ToolCall, ToolContext, tool
from toolcall.types import ParsedTurn


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def negate(a: int) -> int:
    """Negate."""
    return -a


async def answer(name, arguments, context):
    return f"{name} of {arguments['city']} for {context.row['user']}"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "W", "parameters": CITY}}


def load(folder, rows, **changes):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "data": "rows.jsonl",
        "tools": ["tests.unit.tasks.test_row_tools:add", "tests.unit.tasks.test_row_tools:negate"],
        "tools_field": "tools",
        "rewards": ["tasks.rules:exact_match"],
        "held_out": 0.0,
    }
    return load_task(TaskConfig(**{**settings, **changes}), folder, seed=0)


def row(tools, **more):
    return {"question": f"q {tools}", "answer": "a", "user": "Ann", **more, "tools": tools}


def call(task, of_row, name, **arguments):
    async def scenario():
        offered = {tool.name: tool for tool in task.tools_of(of_row)}
        context = ToolContext(row=of_row, offered=offered)
        (result,) = await Executor(task.tools).run(ParsedTurn((ToolCall("1", name, arguments),)), context)
        return result.outcome, result.text

    return asyncio.run(scenario())


def test_a_row_offers_the_tools_it_names_and_a_call_of_another_is_unknown(tmp_path):
    task = load(tmp_path, [row(["negate"]), row(None), row([])])
    named, everything, nothing = task.train
    assert [tool.name for tool in task.tools_of(named)] == ["negate"]
    assert [tool.name for tool in task.tools_of(everything)] == ["add", "negate"]
    assert task.tools_of(nothing) == []
    assert call(task, named, "negate", a=3) == (Outcome.OK, "-3")
    outcome, text = call(task, named, "add", a=1, b=2)
    assert outcome is Outcome.UNKNOWN_TOOL and text == "there is no tool 'add'. The tools are: negate"
    assert call(task, everything, "add", a=1, b=2) == (Outcome.OK, "3")


def test_a_row_describes_a_tool_of_its_own_and_the_tasks_function_answers(tmp_path):
    own = row(["add", WEATHER])
    task = load(tmp_path, [own], tools_answer="tests.unit.tasks.test_row_tools:answer")
    assert [tool.schema()["function"]["name"] for tool in task.tools_of(own)] == ["add", "weather"]
    assert call(task, own, "weather", city="Oslo") == (Outcome.OK, "weather of Oslo for Ann")
    outcome, text = call(task, own, "weather", town="Oslo")
    assert outcome is Outcome.INVALID_ARGUMENTS and "argument 'city' is missing" in text
    assert call(task, own, "add", a="1", b=2) == (Outcome.OK, "3")
    silent = load(tmp_path, [own])
    assert call(silent, own, "weather", city="Oslo") == (Outcome.OK, "ok")


def test_options_of_a_run_hold_for_a_tool_that_a_row_names(tmp_path):
    task = load(tmp_path, [row(["add"])], tool_options={"add": {"max_output_tokens": 1}})
    (task_tool,) = [tool for tool in task.tools if tool.name == "add"]
    assert task_tool.options.max_output_tokens == 1
    outcome, text = call(task, task.train[0], "add", a=12345678, b=2)
    assert outcome is Outcome.OK and text != "12345680"


def test_schemas_as_the_leaderboard_writes_them_or_as_json_text(tmp_path):
    bare = {
        "name": "geo.find",
        "parameters": {
            "type": "dict",
            "properties": {
                "type": {"type": "String"},
                "at": {"type": "tuple", "items": {"type": "float"}},
                "extra": {"type": "any", "default": None},
            },
        },
    }
    task = load(tmp_path, [row(json.dumps([bare]))])
    (tool,) = task.tools_of(task.train[0])
    assert tool.name == "geo_find"
    assert tool.schema()["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "at": {"type": "array", "items": {"type": "number"}},
            "extra": {},
        },
    }


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (["ad"], "rows.jsonl line 2: tools: there is no tool 'ad'; there is: add, negate"),
        ([3], "line 2: tools: 3 is neither a tool's name nor its schema"),
        ("add", "line 2: tools: is text, but no JSON"),
        ({"add": 1}, "line 2: tools: is a dict; write a list"),
        ([{"parameters": CITY}], "line 2: tools: .* has no name"),
        ([{"name": "x", "parameters": {"type": "array"}}], "line 2: .*describes 'array', not an object"),
        ([{"name": "x y", "parameters": CITY}], "line 2: tools: tool name 'x y'"),
        ([{"name": "add", "parameters": CITY}], "line 2: .*the name of the task's tool 'add'"),
        (["add", "add"], "line 2: tools: tool 'add' is offered twice"),
    ],
)
def test_tools_that_a_row_cannot_have_are_errors_that_name_its_line(tmp_path, tools, says):
    with pytest.raises(BadData, match=says):
        load(tmp_path, [row(["add"]), row(tools)])


def made_by_a_function(seed):
    rows = [{"question": "q", "answer": "1", "names": names} for names in ("add", "add negate", "add add")]
    tools = {"add": add, "negate": negate}
    task = load_task(TaskConfig(name="calculator"), Path(), seed)
    return replace(
        task,
        train=rows[: seed + 2],
        held_out=(),
        offered=lambda row: [tools[n] for n in row["names"].split()],
    )


def test_a_functions_rows_are_checked_too():
    config = TaskConfig(name="tests.unit.tasks.test_row_tools:made_by_a_function")
    task = load_task(config, Path(), seed=0)
    assert [len(task.tools_of(row)) for row in task.train] == [1, 2]
    with pytest.raises(BadData, match="calculator row 3: two tools are called 'add'"):
        load_task(config, Path(), seed=1)


def test_a_syntax_of_tags_cannot_call_what_only_a_row_describes(tmp_path):
    with pytest.raises(BadData, match="the task's parser calls only the task's own tools, not 'weather'"):
        load(tmp_path, [row([WEATHER])], parser="tag", tools=["tests.unit.tasks.test_row_tools:negate"])


def test_the_prompt_of_an_episode_lists_its_rows_tools_and_no_others(tmp_path):
    task = load(tmp_path, [row(["add"]), row(["negate", WEATHER])])
    foreign = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    own = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    rollouts, engine, tokenizer = make_rollouts(
        [foreign, own, "done<|im_end|>"], task=task, max_trajectory_tokens=4000, max_observation_tokens=500
    )
    episode = asyncio.run(run_episode(rollouts, make_lease(), 0, task.train[1])).episode
    prompt = tokenizer.decode(engine.requests[0][0])
    assert '"name": "weather"' in prompt and '"name": "negate"' in prompt and '"name": "add"' not in prompt
    ((first,), (second,), ()) = episode.results
    assert first.outcome is Outcome.UNKNOWN_TOOL and "The tools are: negate, weather" in first.text
    assert (second.outcome, second.text) == (Outcome.OK, "ok")
    assert '"name": "add"' in tokenizer.decode(rollouts.renderer.prompt(task.make_messages(task.train[0])))
