"""`load_task`: from the `[task]` section of a config to a `Task`.

Invariant: a task that was loaded can be rolled out and scored: its prompts fill, its tools and rewards
exist, and every reward finds its arguments. Called by actors, the evaluator and `launch.py`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from configs.schema import TaskConfig
from tasks.data import PromptTemplate, split
from tasks.readers import BadData, PlacedRow, read_rows
from tasks.reward import BadReward, arguments_of, check_parameters, configured
from tasks.row_tools import RowTools, acknowledge, check_offered
from tasks.types import Episode, Reward, Task
from toolcall.importing import import_object
from toolcall.parsers import AUTO, make_parser
from toolcall.registry import Tool, load_tools
from toolcall.types import Parser

SHIPPED = {  # functions (seed, **options) -> Task; one with a parameter `folder` gets the config's
    "calculator": "tasks.calculator:calculator_task",
    "code": "tasks.code:code_task",
    "function_calling": "tasks.function_calling:function_calling_task",
    "mcp_files": "tasks.mcp_files:mcp_files_task",
    "search_qa": "tasks.search_qa:search_qa_task",
    "sql": "tasks.sql:sql_task",
}
SUCCESS_AT = 1.0  # of a data task's first reward
REWARD_SETTINGS = ("use", "weight", "name", "timeout", "options", "fields")  # of one entry of task.rewards


class BadTask(ValueError):
    """A `[task]` section that leads to no task; the message names the key and the mend."""


def load_task(config: TaskConfig, config_dir: Path, seed: int) -> Task:
    """The task of `config`. Files and modules are looked for in `config_dir`; `seed` shapes generated data.

    Raises BadTask, BadData, BadReward, toolcall's BadTool or BadReference, each with one sentence.
    """
    task = _data_task(config, config_dir) if config.data else _made_task(config, config_dir, seed)
    if config.tool_options:
        task = replace(task, tools=load_tools(task.tools, options=config.tool_options))
    if len(task.train) < 1:
        raise BadTask(f"task {task.name!r} has no training prompts")
    names = [reward.name for reward in task.rewards]
    if not names:
        raise BadTask(f"task {task.name!r} has no rewards; set task.rewards")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadTask(f"task {task.name!r} has two rewards called {twice!r}; rename one with @reward(name=…)")
    for reward in task.rewards:
        check_parameters(reward, task.train[0])
    return task


def without_prompts(task: Task, dropped: Collection[int]) -> Task:
    """The task without these training rows; the others keep their order."""
    if not dropped:
        return task
    left_out = set(dropped)
    return replace(task, train=[row for i, row in enumerate(task.train) if i not in left_out])


def _made_task(config: TaskConfig, config_dir: Path, seed: int) -> Task:
    """A shipped task, or what the user's `module:function` returns."""
    if config.name in SHIPPED:
        make = import_object(SHIPPED[config.name])
    elif ":" in config.name:
        make = import_object(config.name, config_dir)
    else:
        near = difflib.get_close_matches(config.name, SHIPPED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadTask(
            f"task.name = {config.name!r} is not a shipped task{hint} Use one of: {', '.join(SHIPPED)}, "
            "module:function, or set task.data"
        )
    if not callable(make):
        raise BadTask(f"task.name = {config.name!r} is not a function that returns a Task")
    task = make(**_options(make, config, {"seed": seed, "folder": config_dir}))
    if not isinstance(task, Task):
        raise BadTask(f"task.name = {config.name!r} returned a {type(task).__name__}, not a tasks.Task")
    if task.offered is not None:
        check_offered(task.offered, _numbered(task))
    _check_files(config, _numbered(task))
    return replace(task, tools=load_tools([*task.tools, *_mcp_tools(config, config_dir)]))


def _numbered(task: Task) -> Iterable[PlacedRow]:
    rows = (row for side in (task.train, task.held_out) for row in side)
    return (PlacedRow(row, f"{task.name} row {number}") for number, row in enumerate(rows, 1))


def _options(make: Callable[..., Any], config: TaskConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """`task.options`, checked against the function's parameters, and what of `given` it takes."""
    parameters = inspect.signature(make).parameters
    names = [name for name in parameters if name not in given]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in config.options:
        if option not in names and not open_ended:
            raise BadTask(
                f"task.options has no {option!r} for {config.name!r}; it takes: {', '.join(names) or 'none'}"
            )
    typed = {name: _typed(make, name, value) for name, value in config.options.items()}
    return {**typed, **{name: value for name, value in given.items() if name in parameters}}


def _typed(make: Callable[..., Any], option: str, value: Any) -> Any:
    """`value` as the function's type hint has it. Choices of words are left to the function."""
    try:
        hint = get_type_hints(make, include_extras=True).get(option, Any)
    except (NameError, TypeError):  # hints of names that only a type checker imports; no function
        return value
    if hint is Any or get_origin(hint) is Literal:
        return value
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise BadTask(f"task.options.{option} = {value!r} is refused: {reason}") from None


def _data_task(config: TaskConfig, config_dir: Path) -> Task:
    """A task from a data file (or iterable), tools and rewards. Success: the first reward reaches 1."""
    assert config.data is not None
    rows = read_rows(config.data, config_dir, config.data_split)
    prompt = PromptTemplate(config.prompt, config.system, config.examples)
    prompt.check(rows)
    rewards = _load_rewards(config.rewards, config_dir)
    _check_fields(rewards, rows)
    _check_files(config, rows)
    tools = load_tools([*config.tools, *_mcp_tools(config, config_dir)], config_dir)
    parser = _parser_for(config.parser, config.parser_options, tools)
    offered = _row_tools(config, config_dir, tools, parser, rows)
    train, held_out = split(rows, config.held_out, prompt.prompt)
    return Task(
        name=Path(config.data).stem if ":" not in config.data else config.data,
        train=train,
        held_out=held_out,
        make_messages=prompt.messages,
        tools=tools,
        parser=parser,
        rewards=rewards,
        success=lambda episode: _succeeded(episode, rewards),
        tools_in_prompt=_taught(parser, tools, config),
        offered=offered,
    )


def _row_tools(
    config: TaskConfig, config_dir: Path, tools: Sequence[Tool], parser: Parser | None, rows: list[PlacedRow]
) -> RowTools | None:
    if not config.tools_field:
        return None
    answer = import_object(config.tools_answer, config_dir) if config.tools_answer else acknowledge
    if not inspect.iscoroutinefunction(answer):
        raise BadTask(f"task.tools_answer = {config.tools_answer!r} is no async function; write async def")
    offered = RowTools(config.tools_field, tools, answer)
    offered.check(rows, own=parser is None or not parser.inline)
    return offered


def _mcp_tools(config: TaskConfig, config_dir: Path) -> list[Tool]:
    """Last of a task's parts, since each server is started and asked."""
    if not config.mcp:
        return []
    from toolcall.mcp.loading import load_mcp_tools  # the SDK takes a second to import

    return load_mcp_tools(config.mcp, config_dir)


def _check_files(config: TaskConfig, rows: Iterable[PlacedRow]) -> None:
    fields = {server.files for server in config.mcp.values() if server.files}
    if not fields:
        return
    from toolcall.mcp.folder import BadFiles, check_files

    for placed in rows:
        try:
            for field in fields:
                check_files(placed.row, field)
        except BadFiles as error:
            raise BadData(f"{placed.place}: {error}") from error


def _succeeded(episode: Episode, rewards: Sequence[Reward]) -> bool:
    """By the value that scoring found: a judge is not asked twice."""
    return episode.scores.get(rewards[0].name, 0.0) >= SUCCESS_AT


def _load_rewards(references: Sequence[str | Mapping[str, Any]], config_dir: Path) -> list[Reward]:
    if not references:
        raise BadTask('task.data is set but task.rewards is empty; try rewards = ["tasks.rules:exact_match"]')
    return [_load_reward(reference, config_dir) for reference in references]


def _load_reward(reference: str | Mapping[str, Any], config_dir: Path) -> Reward:
    settings = {"use": reference} if isinstance(reference, str) else reference
    if unknown := next((key for key in settings if key not in REWARD_SETTINGS), None):
        raise BadReward(
            f"task.rewards: {unknown!r} in {dict(settings)} is not one of {', '.join(REWARD_SETTINGS)}"
        )
    use = settings.get("use")
    if not isinstance(use, str):
        raise BadReward(
            f'task.rewards: {dict(settings)} names no reward; write {{ use = "module:object", … }}'
        )
    found = import_object(use, config_dir)
    if not isinstance(found, Reward):
        raise BadReward(f"{use!r} is a {type(found).__name__}, not a reward; decorate it with @reward")
    return found if isinstance(reference, str) else configured(found, settings)


def _check_fields(rewards: Sequence[Reward], rows: Sequence[PlacedRow]) -> None:
    """Every reward must find its fields in every row, with the types of its hints, not only in the first."""
    for reward in rewards:
        for placed in rows:
            try:
                arguments_of(reward, Episode(placed.row, (), (), (), ""))
            except BadReward as error:
                raise BadReward(f"{placed.place}: {error}") from None


def _parser_for(name: str, options: Mapping[str, Any], tools: Sequence[Tool]) -> Parser | None:
    """The call syntax; None leaves the choice to the model's chat template."""
    if name == AUTO:
        if options:
            raise BadTask('task.parser_options belong to one parser; name it with task.parser, not "auto"')
        return None
    if name == "tag" and "tags" not in options:
        options = {**options, "tags": {tool.name: (tool.name, _one_argument(name, tool)) for tool in tools}}
    elif name == "fenced_python" and "tool" not in options:
        if len(tools) != 1:
            raise BadTask(f'task.parser = "fenced_python" runs code by one tool, but there are {len(tools)}')
        options = {**options, "tool": tools[0].name, "argument": _one_argument(name, tools[0])}
    parser = make_parser(name, [tool.schema() for tool in tools], **options)
    if parser.inline:
        _check_targets(parser, tools)
    return parser


def _one_argument(parser: str, tool: Tool) -> str:
    """The argument that an inline syntax fills, where it is clear."""
    arguments = list(tool.signature.parameters["properties"])
    required = tool.signature.parameters.get("required", arguments[:1])
    if len(required) != 1:
        raise BadTask(
            f'task.parser = "{parser}" writes one argument as text, but tool {tool.name!r} needs '
            f'{len(required)}: {", ".join(required) or "none"}; use parser = "auto"'
        )
    return required[0]


def _check_targets(parser: Parser, tools: Sequence[Tool]) -> None:
    """What an inline syntax is set to call must exist, and every tool must be callable by it."""
    by_name = {tool.name: tool for tool in tools}
    targets = parser.targets
    for name, argument in targets:
        if name not in by_name:
            raise BadTask(f"task.parser_options call {name!r}, but the tools are: {', '.join(by_name)}")
        known = list(by_name[name].signature.parameters["properties"])
        if argument not in known:
            raise BadTask(
                f"task.parser_options fill {argument!r} of tool {name!r}, which takes: {', '.join(known)}"
            )
    for name in by_name:
        if name not in dict(targets):
            raise BadTask(f"task.parser_options give the model no way to call tool {name!r}")


def _taught(parser: Parser | None, tools: Sequence[Tool], config: TaskConfig) -> bool:
    """Does the prompt itself show how to call every tool? No chat template knows an inline syntax."""
    if parser is None or not parser.inline:
        return False
    prompt = "\n".join([config.system, config.prompt, *(turn["content"] for turn in config.examples)])
    return all(parser.offered_as(tool.name) in prompt for tool in tools)


__all__ = ["SHIPPED", "BadData", "BadReward", "BadTask", "load_task", "without_prompts"]
