"""The `@tool` decorator and `load_tools`: from a function to a `Tool`.

Invariant: a `Tool` that was built can be shown to a model and called; anything else was refused with
`BadTool` at decoration or load, before a model starts. Called by users' modules and `tasks.loading`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from toolcall.errors import BadTool
from toolcall.importing import import_object
from toolcall.signature import Signature, read_signature
from toolcall.types import ToolContext

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # what OpenAI-style schemas allow
RESERVED_NAMES = frozenset({"answer", "result", "think", "tool_call", "tool_response"})
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_CONCURRENCY = 32


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, and the limits under which the executor runs it."""

    name: str
    fn: Callable[..., Any]
    signature: Signature
    timeout: float = DEFAULT_TIMEOUT_S  # seconds of one attempt, waiting for a slot not counted
    max_concurrency: int = DEFAULT_MAX_CONCURRENCY  # running at once in one executor
    idempotent: bool = False  # running twice is the same as once: a precondition of retries
    retries: int = 0  # after a timeout or an infrastructure failure
    cache: bool = False  # equal arguments share one run, across trajectories
    max_output_chars: int | None = None  # None: the executor's

    def __post_init__(self) -> None:
        _refuse_settings(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself: no validation, no limits."""
        return self.fn(*args, **kwargs)

    @property
    def description(self) -> str:
        return self.signature.description

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.fn)

    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI-style function schema, as chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.signature.parameters,
        }
        return {"type": "function", "function": function}

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments with the types of the hints. Raises InvalidArguments naming the fields."""
        return self.signature.validate(arguments)

    def bind(self, arguments: dict[str, Any], context: ToolContext) -> Callable[[], Any]:
        """The function with validated arguments, and the context if it asks for one, ready to be called."""
        if self.signature.context_parameter is not None:
            arguments = {**arguments, self.signature.context_parameter: context}
        return functools.partial(self.fn, **arguments)


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
    idempotent: bool = False,
    retries: int = 0,
    cache: bool = False,
    max_output_chars: int | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **limits: Any) -> Any:
    """Make a tool of an async or sync function: `@tool` or `@tool(timeout=10, idempotent=True, …)`.

    The schema comes from the type hints, the descriptions from the docstring (Google, NumPy or Sphinx
    style). A parameter typed `ToolContext` is filled by the executor and hidden from the model.
    """
    if fn is None:
        return lambda function: _make(function, name, limits)
    return _make(fn, name, limits)


def load_tools(references: Sequence[str | Tool], folder: Path | None = None) -> list[Tool]:
    """Tools from `module:object` references (or ready tools), importable from `folder` too.

    Raises BadTool if one leads to something else or two have the same name.
    """
    tools: list[Tool] = []
    for reference in references:
        found = import_object(reference, folder) if isinstance(reference, str) else reference
        if not isinstance(found, Tool):
            raise BadTool(f"{reference!r} is a {type(found).__name__}, not a tool; decorate it with @tool")
        if found.name in {known.name for known in tools}:
            raise BadTool(f"two tools are called {found.name!r}; rename one with @tool(name=…)")
        tools.append(found)
    return tools


def _make(fn: Any, name: str | None, limits: dict[str, Any]) -> Tool:
    if not inspect.isfunction(fn):
        raise BadTool(f"@tool takes a function, not {fn!r}; decorate a plain or async def")
    name = name or fn.__name__
    if not NAME.fullmatch(name):
        raise BadTool(f"tool name {name!r} must be letters, digits, _ or -; give one with @tool(name=…)")
    if name.lower() in RESERVED_NAMES:
        raise BadTool(f"tool name {name!r} is a tag of the call syntax; give another with @tool(name=…)")
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise BadTool(f"tool {name!r} yields, but a call has one result; return it instead")
    return Tool(name=name, fn=fn, signature=read_signature(fn, name), **limits)


def _refuse_settings(tool: Tool) -> None:
    where = f"tool {tool.name!r}"
    if tool.timeout <= 0:
        raise BadTool(f"{where}: timeout = {tool.timeout} must be above 0 seconds")
    if tool.max_concurrency < 1:
        raise BadTool(
            f"{where}: max_concurrency = {tool.max_concurrency} would let no call run; use 1 or more"
        )
    if tool.retries < 0:
        raise BadTool(f"{where}: retries = {tool.retries} must be 0 or more")
    if tool.retries and not tool.idempotent:
        raise BadTool(f"{where}: retries need idempotent=True, since a failed call may have had its effect")
    if tool.cache and not tool.idempotent:
        raise BadTool(f"{where}: cache=True needs idempotent=True, since equal calls then run once")
    if tool.cache and tool.signature.context_parameter:
        raise BadTool(
            f"{where}: cache=True shares results between trajectories, so it cannot take a ToolContext"
        )
    if tool.max_output_chars is not None and tool.max_output_chars < 1:
        raise BadTool(f"{where}: max_output_chars = {tool.max_output_chars} must be 1 or more")
