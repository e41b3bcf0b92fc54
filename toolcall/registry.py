"""The `@tool` decorator and `load_tools`: from a function, a class or a JSON schema to `Tool`s.

Invariant: a `Tool` that was built can be shown to a model and called; anything else was refused with
`BadTool` at decoration or load, before a model starts. Called by users' modules and `tasks.loading`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from toolcall.errors import BadTool
from toolcall.factories import make_tools
from toolcall.importing import import_object
from toolcall.instances import LIFECYCLE, ToolClass
from toolcall.options import ToolOptions, nearest
from toolcall.schema_arguments import SchemaArguments
from toolcall.signature import Arguments, Signature, read_signature
from toolcall.types import ToolContext

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # what OpenAI-style schemas allow
RESERVED_NAMES = frozenset({"answer", "result", "think", "tool_call", "tool_response"})
SETUP_TIMEOUT_S = 60.0
_TOOLS, _OPTIONS = (
    "__slipstream_tools__",
    "__slipstream_options__",
)  # on a decorated class, a decorated method

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Tool:
    """Something that the model may call, and the limits under which the executor runs it."""

    name: str
    fn: Callable[..., Any]
    signature: Arguments
    options: ToolOptions = field(default_factory=ToolOptions)
    owner: ToolClass | None = None  # `fn` is a method of this class
    shutdown: Callable[[], Awaitable[None]] | None = None
    # ends what all trajectories share (a server, a pool); `Executor.close` runs equal ones once
    probe: Callable[[], Awaitable[None]] | None = None
    # while the tool is down: asks what is behind it, and raises if that is still gone
    prepare: Callable[[], Awaitable[str]] | None = None
    # before a run, once: builds or checks what the tool needs, says what it found, raises what is missing

    def __post_init__(self) -> None:
        _refuse_name(self.name)
        hinted = isinstance(self.signature, Signature)  # one with a schema gets the context unasked
        if self.options.cache and (self.owner or (hinted and self.signature.takes_context)):
            raise BadTool(
                f"tool {self.name!r}: a cache shares results between trajectories, so it cannot take a "
                "ToolContext nor belong to a class"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself: no validation, no limits."""
        return self.fn(*args, **kwargs)

    @property
    def description(self) -> str:
        return self.signature.description

    @functools.cached_property
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

    def bind(
        self, arguments: dict[str, Any], context: ToolContext, instance: object = None
    ) -> Callable[[], Any]:
        """The function with validated arguments, and the context if it asks for one, ready to be called.
        `instance`: the trajectory's object, for a method."""
        fn = self.fn if self.owner is None else functools.partial(self.fn, instance)
        return self.signature.bind(fn, arguments, context)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change a result: source, schema, `version` and how it is cut."""
        try:
            source = inspect.getsource(self.fn)
        except (OSError, TypeError):  # a builtin, or typed into a console
            source = ""
        parts = (
            self.name,
            source,
            self.options.version,
            json.dumps(self.signature.parameters, sort_keys=True),
            f"{self.options.max_output_tokens} {self.options.keep}",
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def with_options(self, given: Mapping[str, Any]) -> Tool:
        """The same tool under other options. Raises BadTool for an unknown one."""
        return replace(self, options=ToolOptions.of(self.name, given, self.options))


class Decorator(Protocol):
    """What `@tool(…)` does: a class stays itself, a function becomes a Tool."""

    @overload  # a class is callable too, so the order of the two matters
    def __call__(self, decorated: C, /) -> C: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, decorated: Callable[..., Any], /) -> Tool: ...


@overload
def tool(fn: C, /) -> C: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    prefix: str = "",
    setup_timeout: float = SETUP_TIMEOUT_S,
    timeout: float = ...,
    queue_timeout: float = ...,
    max_concurrency: int = ...,
    run_concurrency: int | None = ...,
    rate_limit: float | None = ...,
    idempotent: bool = ...,
    retries: int = ...,
    backoff: float = ...,
    cache: bool | str = ...,
    cache_ttl: float | None = ...,
    version: str = ...,
    max_output_tokens: int | None = ...,
    keep: str = ...,
    breaker_threshold: int = ...,
    breaker_cooldown: float = ...,
) -> Decorator: ...
def tool(fn: Any = None, /, **settings: Any) -> Any:
    """Make a tool of an async or sync function: `@tool` or `@tool(timeout=10, idempotent=True, …)`.

    The schema comes from the type hints, the descriptions from the docstring (Google, NumPy or Sphinx
    style). A parameter typed `ToolContext` is filled by the executor and hidden from the model.

    Of a class, every public method with a docstring becomes a tool; each trajectory has an object of its
    own. `prefix` goes before the methods' names; `@tool(…)` on a method sets that method's options.
    """
    if fn is None:
        return lambda decorated: _decorate(decorated, settings)
    return _decorate(fn, settings)


def schema_tool(
    name: str,
    description: str,
    parameters: dict[str, Any],
    call: Callable[[dict[str, Any], ToolContext], Awaitable[Any]],
    *,
    shutdown: Callable[[], Awaitable[None]] | None = None,
    probe: Callable[[], Awaitable[None]] | None = None,
    **options: Any,
) -> Tool:
    """A tool whose arguments are described by a JSON schema, which the model is shown as it is.

    call: async, gets the validated arguments and the trajectory's context. shutdown, probe: see `Tool`.
    Raises BadTool if the schema is
    no valid one for an object.
    """
    arguments = SchemaArguments(name, description, parameters)
    return Tool(name, call, arguments, ToolOptions.of(name, options), shutdown=shutdown, probe=probe)


def load_tools(
    references: Sequence[Any],
    folder: Path | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Tool]:
    """Tools from `module:object` references, importable from `folder` too, or from what these lead to:
    a tool, a decorated class, a list of such, or (`{use = "module:function", options = {…}}`) a function
    that makes one. `options`: what a run changes, by tool name.

    Raises BadTool if one leads to something else, two have the same name, or an option fits none.
    """
    tools: dict[str, Tool] = {}
    for reference in references:
        found = import_object(reference, folder) if isinstance(reference, str) else reference
        if isinstance(found, Mapping):
            found = make_tools(found, folder)
        for each in _tools_of(found, reference):
            if each.name in tools:
                raise BadTool(
                    f"two tools are called {each.name!r}; rename one with @tool(name=…), "
                    "or by rename or prefix of its MCP server"
                )
            tools[each.name] = each
    for name, given in (options or {}).items():
        if name not in tools:
            raise BadTool(f"task.tool_options: there is no tool {name!r}{nearest(name, tools)}")
        tools[name] = tools[name].with_options(given)
    return list(tools.values())


def _tools_of(found: Any, reference: Any) -> Iterable[Tool]:
    if isinstance(found, Tool):
        yield found
    elif isinstance(found, type) and _TOOLS in vars(found):
        yield from vars(found)[_TOOLS]
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tools_of(each, reference)
    else:
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        mend = "decorate it with @tool"
        if inspect.isfunction(found):
            mend += f", or write {{ use = {reference!r}, options = {{…}} }} if it makes a tool"
        raise BadTool(f"{reference!r} is {kind}, not a tool; {mend}")


def _decorate(decorated: Any, settings: dict[str, Any]) -> Any:
    if isinstance(decorated, type):
        setattr(decorated, _TOOLS, _class_tools(decorated, **settings))
        return decorated
    if not inspect.isfunction(decorated):
        raise BadTool(
            f"@tool takes a function or a class, not {decorated!r}; decorate a def, async def or class"
        )
    if _is_method(decorated):
        setattr(decorated, _OPTIONS, settings)
        return decorated
    return _function_tool(decorated, **settings)


def _is_method(fn: Callable[..., Any]) -> bool:
    """Written inside a class: the class's own decorator makes the tool."""
    return next(iter(inspect.signature(fn).parameters), "") == "self"


def _refuse_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadTool(f"tool name {name!r} must be letters, digits, _ or -; give one with @tool(name=…)")
    if name.lower() in RESERVED_NAMES:
        raise BadTool(f"tool name {name!r} is a tag of the call syntax; give another with @tool(name=…)")


def _function_tool(
    fn: Callable[..., Any], name: str | None = None, owner: ToolClass | None = None, **options: Any
) -> Tool:
    name = name or fn.__name__
    _refuse_name(name)
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise BadTool(f"tool {name!r} yields, but a call has one result; return it instead")
    settings = ToolOptions.of(name, options)
    return Tool(name, fn, read_signature(fn, name, method=owner is not None), settings, owner)


def _class_tools(
    cls: type, prefix: str = "", setup_timeout: float = SETUP_TIMEOUT_S, **options: Any
) -> tuple[Tool, ...]:
    if "name" in options:
        raise BadTool(
            f"tool class {cls.__name__} has several names; use @tool(prefix=…) or rename its methods"
        )
    if setup_timeout <= 0:
        raise BadTool(f"tool class {cls.__name__}: setup_timeout = {setup_timeout} must be above 0 seconds")
    needed = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    if needed:
        raise BadTool(
            f"tool class {cls.__name__}: objects are made without arguments; give {needed[0]!r} a default"
        )
    owner = ToolClass(cls, setup_timeout)
    tools = []
    for method_name, method in _methods(cls).items():
        own = {**options, **getattr(method, _OPTIONS, {})}
        name = prefix + own.pop("name", method_name)
        tools.append(_function_tool(method, name, owner, **own))
    if not tools:
        raise BadTool(f"tool class {cls.__name__} has no public method with a docstring, so nothing to offer")
    return tuple(tools)


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Public methods that have a docstring or `@tool`, in the order in which they are written."""
    names = [name for base in reversed(cls.__mro__) for name in vars(base)]
    found = {}
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(cls, name)
        offered = inspect.isfunction(method) and (hasattr(method, _OPTIONS) or inspect.getdoc(method))
        if offered and not name.startswith("_") and name not in LIFECYCLE:
            found[name] = method
    return found
