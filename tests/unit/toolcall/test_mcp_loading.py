"""From `[task.mcp.NAME]` to tools that the executor runs: choosing, naming, schemas, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from configs.mcp_servers import McpConfig
from tests.mcp_by_hand import TOOLS
from tests.unit.toolcall.support import turn
from toolcall.executor import Executor
from toolcall.mcp.loading import load_mcp_tools
from toolcall.mcp.server import BadServer
from toolcall.types import Outcome, ToolContext

HERE = Path(__file__).parents[2]
PATIENCE_S = 60.0  # of a busy machine


def by_hand(*options: str, **config) -> McpConfig:
    given = {"command": "python", "args": ["mcp_by_hand.py", *options], "connect_timeout_s": PATIENCE_S}
    return McpConfig.model_validate(given | config)


def load(**servers: McpConfig):
    return load_mcp_tools(servers, HERE)


def run(tools, body, **options):
    async def scenario():
        executor = Executor(tools, **options)
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                return await body(executor)
        finally:
            await executor.close()

    return asyncio.run(scenario())


async def one(executor: Executor, name: str, context: ToolContext | None = None, **arguments):
    (result,) = await executor.run(turn((name, arguments)), context or ToolContext())
    return result


def test_the_servers_schemas_are_shown_as_they_are_page_by_page():
    tools = {tool.name: tool for tool in load(town=by_hand(timeout_s=7, max_concurrency=3))}
    assert {name: tool.schema()["function"]["parameters"] for name, tool in tools.items()} == TOOLS
    assert tools["die"].description == "The die tool."
    assert (tools["echo"].options.timeout, tools["echo"].options.max_concurrency) == (7, 3)


def test_nested_arguments_are_checked_by_the_servers_schema_and_sent_as_they_are():
    arguments = {"place": {"x": 3}, "tags": ["a"]}

    async def body(executor):
        good = await one(executor, "nested", **arguments)
        bad = await one(executor, "nested", place={"y": 3})
        return good, bad

    good, bad = run(load(town=by_hand(include=["nested"])), body)
    assert json.loads(good.text) == arguments
    assert bad.outcome is Outcome.INVALID_ARGUMENTS and "place" in bad.text


def test_tools_are_chosen_renamed_and_prefixed():
    chosen = by_hand(include=["e*", "nested", "pids"], exclude=["pi?s"], rename={"echo": "say"}, prefix="t_")
    assert [tool.name for tool in load(town=chosen)] == ["say", "t_nested"]

    async def body(executor):
        return await one(executor, "say", text="a"), await one(executor, "t_nested", tags=["b"])

    said, nested = run(load(town=chosen), body)
    assert said.text == "a" and nested.outcome is Outcome.OK


def test_tools_of_several_servers_stand_in_the_order_of_the_config():
    tools = load(b=by_hand(include=["echo"]), a=by_hand(include=["echo"], prefix="a_"))
    assert [tool.name for tool in tools] == ["echo", "a_echo"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"include": ["ecko"]},
            r"task.mcp.town.include has 'ecko', .* did you mean 'echo'\? There are: echo, ",
        ),
        ({"exclude": ["x*"]}, r"task.mcp.town.exclude has 'x\*', which no tool is called; there are"),
        ({"rename": {"say": "echo"}}, "task.mcp.town.rename has 'say'"),
        ({"exclude": ["echo"], "rename": {"echo": "say"}}, "task.mcp.town.rename has 'echo', which no tool"),
        (
            {"exclude": ["*"]},
            "task.mcp.town gives no tool; the server offers: echo, getenv, pids, ",
        ),
        ({"rename": {"echo": "answer"}}, r"task.mcp.town offers a tool that cannot be used: .*'answer'"),
        ({"prefix": "a.b"}, 'rename = { "echo" = "…" }'),
    ],
)
def test_a_choice_that_fits_nothing_is_refused_with_what_there_is(config, says):
    with pytest.raises(BadServer, match=says):
        load(town=by_hand(**config))


def test_a_program_that_ends_at_once_is_refused_with_its_last_words():
    with pytest.raises(BadServer, match=r"MCP server 'town' cannot be used: .*no such map: atlantis$"):
        load(town=by_hand("broken"))


def test_a_program_that_never_answers_is_refused_at_the_deadline():
    with pytest.raises(BadServer, match=r"no answer within task\.mcp\.town\.connect_timeout_s = 0\.5"):
        load(town=by_hand("mute", connect_timeout_s=0.5))


def test_an_address_where_nobody_answers_is_refused():
    with pytest.raises(BadServer, match="MCP server 'web' cannot be used: "):
        load(web=McpConfig(url="http://127.0.0.1:9/mcp"))


def test_tools_load_inside_a_running_loop_and_without_one():
    async def inside():
        return load(town=by_hand(include=["echo"]))

    assert len(asyncio.run(inside())) == len(load(town=by_hand(include=["echo"]))) == 1


def test_c14_through_the_executor_a_death_is_infrastructure_and_later_calls_work():
    async def body(executor):
        return await one(executor, "die"), await one(executor, "echo", text="a")

    died, later = run(load(town=by_hand()), body)
    assert died.outcome is Outcome.INFRASTRUCTURE
    assert died.text == (
        "die is unavailable (MCP server 'town': Connection closed); it may or may not have taken effect, "
        "the outcome is unknown, and it was not retried"
    )
    assert (later.outcome, later.text) == (Outcome.OK, "a")


def test_c14_a_tool_whose_server_dies_of_it_again_and_again_opens_the_breaker():
    async def body(executor):
        return [(await one(executor, "die")).outcome for _ in range(3)] + [
            (await one(executor, "echo", text="a")).outcome
        ]

    tools = [tool.with_options({"breaker_threshold": 2}) for tool in load(town=by_hand())]
    outcomes = run(tools, body)
    assert outcomes == [Outcome.INFRASTRUCTURE, Outcome.INFRASTRUCTURE, Outcome.BREAKER_OPEN, Outcome.OK]


def test_c9_each_trajectory_has_its_own_server_which_ends_with_it():
    async def body(executor):
        first, second = ToolContext("a"), ToolContext("b")
        pids = [(await one(executor, "pids", context)).text for context in (first, second, first)]
        assert pids[0] == pids[2] != pids[1]
        await executor.finish(first)
        lost = await one(executor, "pids", first)
        alive = await one(executor, "pids", second)
        await executor.finish(second)
        assert lost.outcome is Outcome.INFRASTRUCTURE and alive.text == pids[1]

    run(load(town=by_hand(scope="trajectory")), body)
