"""A task whose tools come from an MCP server as well."""

from pathlib import Path

import pytest

from configs.mcp_servers import McpConfig
from configs.schema import TaskConfig
from tasks.loading import load_task
from toolcall.errors import BadTool

HERE = Path(__file__).parents[2]  # of tests/mcp_by_hand.py


def server(**config) -> McpConfig:
    base = {"command": "python", "args": ["mcp_by_hand.py"], "connect_timeout_s": 60, "include": ["echo"]}
    return McpConfig.model_validate(base | config)


def load(**settings):
    return load_task(TaskConfig.model_validate(settings), HERE, seed=0)


def test_a_servers_tools_come_after_the_tasks_own_and_take_options():
    task = load(mcp={"town": server()}, tool_options={"echo": {"idempotent": True, "retries": 2}})
    assert [tool.name for tool in task.tools] == ["calculator", "echo"]
    assert task.tools[1].options.retries == 2


def test_a_name_that_a_task_and_a_server_both_use_is_refused():
    with pytest.raises(BadTool, match=r"two tools are called 'calculator'; .* rename or prefix of its MCP"):
        load(mcp={"town": server(rename={"echo": "calculator"})})


def test_a_name_that_renaming_gives_to_two_tools_is_refused():
    with pytest.raises(BadTool, match="two tools are called 'pids'"):
        load(mcp={"town": server(include=["echo", "pids"], rename={"echo": "pids"})})


def test_a_servers_tool_is_called_by_its_tag(tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "Where?", "answer": "here"}\n' * 2)
    settings = {"data": str(data), "parser": "tag", "rewards": ["tasks.rules:exact_match"]}
    (call,) = load(mcp={"town": server()}, **settings).parser.parse("<echo>a</echo>").calls
    assert (call.name, call.arguments) == ("echo", {"text": "a"})
