"""Tools per row: a field that names some of the task's tools, or describes tools that only this row has.

Invariant: once `check` has passed, every row's tools can be shown to a model and called. A call of a tool
that the row does not offer is answered as one that does not exist. Made by `tasks.loading` and shipped tasks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tasks.readers import BadData, PlacedRow
from tasks.types import Row
from toolcall import BadTool, Tool, ToolContext, load_tools, schema_tool

Answer = Callable[[str, dict[str, Any], ToolContext], Awaitable[Any]]  # tool, arguments, context -> result
_TYPES = {  # of the Berkeley leaderboard, which names types as Python and Java do
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "char": "string",
    "any": None,
}
_CACHED = 4096  # tools, so that the members of a group and the next epoch read a schema once


async def acknowledge(name: str, arguments: dict[str, Any], context: ToolContext) -> str:
    """The answer where only the call matters."""
    return "ok"


class RowTools:
    """What a row offers, by its `field`: a list (or JSON text of one) of names of `tools` and of JSON schemas
    in OpenAI's form, with or without its `function` wrapper. A row without the field offers all `tools`.

    answer: called for the tools that a schema describes, with valid arguments.
    """

    def __init__(self, field: str, tools: Sequence[Tool], answer: Answer = acknowledge) -> None:
        self._field = field
        self._tools = {tool.name: tool for tool in tools}
        self._described = lru_cache(_CACHED)(functools.partial(_described, answer))

    def __call__(self, row: Row) -> Sequence[Tool]:
        """Raises BadTool."""
        entries = row.get(self._field)
        if entries is None:
            return list(self._tools.values())
        found = [self._tool(entry) for entry in _as_list(entries)]
        names = [tool.name for tool in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadTool(f"tool {twice!r} is offered twice")
        return found

    def check(self, rows: Iterable[PlacedRow], own: bool = True) -> None:
        """Raises BadData naming the first row whose tools cannot be used. own: rows may describe tools."""
        for placed in rows:
            try:
                offered = self(placed.row)
            except BadTool as error:
                raise BadData(f"{placed.place}: {self._field}: {error}") from error
            described = [tool.name for tool in offered if tool.name not in self._tools]
            if described and not own:
                raise BadData(
                    f"{placed.place}: {self._field}: the task's parser calls only the task's own tools, not "
                    f'{described[0]!r}; use task.parser = "auto"'
                )

    def _tool(self, entry: Any) -> Tool:
        if isinstance(entry, str):
            if entry not in self._tools:
                raise BadTool(f"there is no tool {entry!r}; there is: {', '.join(self._tools) or 'none'}")
            return self._tools[entry]
        if not isinstance(entry, Mapping):
            raise BadTool(f"{entry!r} is neither a tool's name nor its schema")
        described = self._described(json.dumps(entry, default=str))
        if described.name in self._tools:
            raise BadTool(f"a schema has the name of the task's tool {described.name!r}; give the name alone")
        return described


def check_offered(offered: Callable[[Row], Sequence[Tool]], rows: Iterable[PlacedRow]) -> None:
    """The same for a function of a user's own. Raises BadData."""
    for placed in rows:
        try:
            load_tools(offered(placed.row))
        except BadTool as error:
            raise BadData(f"{placed.place}: {error}") from error


def callable_name(name: str) -> str:
    """`math.factorial` as models may write it."""
    return name.replace(".", "_")


def _as_list(entries: Any) -> Sequence[Any]:
    if isinstance(entries, str):
        try:
            entries = json.loads(entries)
        except ValueError as error:
            raise BadTool(f"is text, but no JSON ({error}); write a list of names or schemas") from error
    if not isinstance(entries, list | tuple):
        raise BadTool(f"is a {type(entries).__name__}; write a list of names or schemas")
    return entries


def _described(answer: Answer, text: str) -> Tool:
    entry = json.loads(text)
    function = entry.get("function", entry)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadTool(f"{text[:80]} has no name; a schema has a name, a description and parameters")
    parameters = _in_json_types(function.get("parameters") or {})
    if not isinstance(parameters, dict):
        raise BadTool(f"tool {function['name']!r}: its parameters are no JSON schema")
    name = callable_name(function["name"])
    return schema_tool(
        name, str(function.get("description", "")), parameters, functools.partial(answer, name)
    )


def _in_json_types(schema: Any) -> Any:
    """A schema with the types that JSON has, and without fields that are None, which Parquet adds."""
    if isinstance(schema, list):
        return [_in_json_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    clean = {key: _in_json_types(value) for key, value in schema.items() if value is not None}
    kind = clean.get("type")
    if isinstance(kind, str):
        lower = kind.lower()
        wanted = _TYPES.get(lower, lower)
        clean = {key: value for key, value in clean.items() if key != "type"}
        return clean if wanted is None else {"type": wanted, **clean}
    return clean
