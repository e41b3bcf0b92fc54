"""Tools that a config has made: `{ use = "module:function", options = { … } }`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolcall import BadTool, Tool, load_tools, tool


def make_echo(word: str, times: int = 1, folder: Path | None = None) -> Tool:
    @tool
    async def echo() -> str:
        """Say it."""
        return f"{word * times} in {folder}"

    if times < 1:
        raise ValueError(f"times = {times} must be above 0")
    return echo


async def no_tool(query: str) -> str:
    return query


HERE = __name__


def test_options_and_the_config_s_folder_reach_the_function(tmp_path):
    import asyncio

    (made,) = load_tools([{"use": f"{HERE}:make_echo", "options": {"word": "a", "times": 2}}], tmp_path)
    assert asyncio.run(made()) == f"aa in {tmp_path}"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"use": f"{HERE}:make_echo"}, "needs the option 'word'"),
        ({"use": f"{HERE}:make_echo", "options": {"wrd": "a"}}, "takes no option 'wrd'; did you mean 'word'"),
        ({"use": f"{HERE}:make_echo", "options": {"word": "a", "times": 0}}, "times = 0 must be above 0"),
        ({"use": f"{HERE}:make_echo", "option": {}}, "'option' in .*did you mean 'options'"),
        ({"options": {}}, "must be { use = "),
        ({"use": f"{HERE}:HERE", "options": {"a": 1}}, "is no function that makes a tool"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_mend(entry: dict[str, Any], says: str):
    with pytest.raises(BadTool, match=says):
        load_tools([entry])


def test_a_reference_to_a_function_that_makes_tools_says_how_to_write_it():
    with pytest.raises(BadTool, match=r"write \{ use = '.*:make_echo', options"):
        load_tools([f"{HERE}:make_echo"])


@pytest.mark.parametrize(
    ("use", "options", "name"),
    [
        ("toolcall.tools.python:python_tool", {"session": True}, "python"),
        ("toolcall.tools.python:python", {}, "python"),
        ("toolcall.tools.search:bm25_tool", {"corpus": "c.jsonl"}, "search"),
        ("toolcall.tools.search:retriever_tool", {"url": "http://h/retrieve"}, "search"),
        ("toolcall.tools.http_fetch:http_fetch_tool", {"hosts": ["example.org"]}, "http_fetch"),
        ("toolcall.tools.calculator:calculator", {}, "calculator"),
    ],
)
def test_the_shipped_tools_can_be_named_in_a_config(use, options, name):
    assert [made.name for made in load_tools([{"use": use, "options": options}])] == [name]
