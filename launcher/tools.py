"""`launch.py tools`: what the model is offered, and one call of it as a run executes calls.

Called by `launcher.commands`; needs no model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from launcher.preflight import PreflightError
from tasks.types import Task
from toolcall.executor import Executor
from toolcall.registry import Tool
from toolcall.types import Outcome, ParsedTurn, ToolCall, ToolContext, ToolResult
from toolcall.work import run

CLEAN_UP_TIMEOUT_S = 30.0
_USAGE = """write: python launch.py tools call NAME '{"argument": "value"}'"""


def print_tools(console: Console, tools: Sequence[Tool]) -> None:
    """Name and schema of each, as chat templates get them."""
    for tool in tools:
        console.print(f"\n[bold]tool {tool.name}[/]", highlight=False)
        console.print_json(json.dumps(tool.schema()))


def read_call(words: Sequence[str]) -> ToolCall | None:
    """`call NAME JSON` from the command line; None if there is no word. Raises PreflightError."""
    if not words:
        return None
    if words[0] != "call" or len(words) not in (2, 3):
        raise PreflightError(f"unexpected {' '.join(words)!r} after tools; {_USAGE}")
    text = words[2] if len(words) == 3 else "{}"
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise PreflightError(f"the arguments {text!r} are not JSON ({error}); {_USAGE}") from None
    if not isinstance(arguments, dict):
        raise PreflightError(f"the arguments {text!r} are no JSON object; {_USAGE}")
    return ToolCall("call_0", words[1], arguments)


def try_call(console: Console, tasks: Sequence[Task], call: ToolCall) -> bool:
    """Run the call for the first prompt of the task that has the tool, and print what the model would read.
    True if it worked."""
    task = next((task for task in tasks if call.name in _offered(task)), tasks[0])
    result = run(_run(task, call))
    seconds = result.span.ended - result.span.started
    said = f"{result.name}: {result.outcome} in {seconds:.3f} s"
    console.print(said, style="bold", highlight=False, markup=False)
    console.print(result.text, highlight=False, markup=False, soft_wrap=True)
    return result.outcome is Outcome.OK


def _offered(task: Task) -> dict[str, Tool]:
    """To the first prompt."""
    return {tool.name: tool for tool in task.tools_of(task.train[0])}


async def _run(task: Task, call: ToolCall) -> ToolResult:
    executor = Executor(task.tools)
    row: dict[str, Any] = task.train[0]
    context = ToolContext(trajectory_id="try", group_id="try", row=row, offered=_offered(task))
    try:
        (result,) = await executor.run(ParsedTurn((call,)), context)
        return result
    finally:
        async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
            await executor.finish(context)
            await executor.close()
