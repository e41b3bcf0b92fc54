"""From a function's type hints and docstring to a JSON schema and a validator.

Invariant: what the schema shows the model is what the validator accepts, and both leave the injected
`ToolContext` parameter and a method's `self` out. Called by `toolcall.registry` when a function is decorated.

The validator is a pydantic TypedDict rather than a model, so that a parameter may have any name
(`schema`, `copy`, `model_config`); defaults stay with the function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Protocol,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import docstring_parser
from pydantic import (
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from toolcall.errors import BadTool, InvalidArguments
from toolcall.types import ToolContext

MAX_ERRORS_SHOWN = 5
MAX_VALUE_SHOWN = 60

_CONFIG = ConfigDict(
    extra="forbid",
    coerce_numbers_to_str=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=False,
)


class Arguments(Protocol):
    """What a call of a tool may hold, wherever that is known from: type hints or a given JSON schema."""

    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments object, as the model is shown it."""
        ...

    @property
    def takes_context(self) -> bool:
        """Does the function get the ToolContext?"""
        ...

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Coerced arguments (`"3"` becomes 3 for an integer). Raises InvalidArguments naming the fields."""
        ...

    def canonical(self, arguments: dict[str, Any]) -> str:
        """Validated arguments as JSON with sorted keys: equal calls give equal text."""
        ...

    def bind(
        self, fn: Callable[..., Any], arguments: dict[str, Any], context: ToolContext
    ) -> Callable[[], Any]:
        """`fn` with validated arguments, and the context if it asks for one, ready to be called."""
        ...


@dataclass(frozen=True)
class Signature:
    """`Arguments` by the type hints of a function."""

    description: str
    parameters: dict[str, Any]
    context_parameter: str | None  # filled by the executor, never shown
    _adapter: TypeAdapter[Any]

    @property
    def takes_context(self) -> bool:
        return self.context_parameter is not None

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(self._adapter.validate_python(arguments))
        except ValidationError as error:
            raise InvalidArguments(self._explain(error)) from None

    def canonical(self, arguments: dict[str, Any]) -> str:
        return json.dumps(self._adapter.dump_python(arguments, mode="json"), sort_keys=True)

    def bind(
        self, fn: Callable[..., Any], arguments: dict[str, Any], context: ToolContext
    ) -> Callable[[], Any]:
        if self.context_parameter is not None:
            arguments = {**arguments, self.context_parameter: context}
        return functools.partial(fn, **arguments)

    def _explain(self, error: ValidationError) -> str:
        details = error.errors(include_url=False, include_context=False)
        return explain([_reason(detail) for detail in details], self.parameters)


def explain(reasons: Sequence[str], parameters: dict[str, Any]) -> str:
    """The first reasons, and which arguments there are."""
    shown = list(reasons[:MAX_ERRORS_SHOWN])
    if len(reasons) > MAX_ERRORS_SHOWN:
        shown.append(f"and {len(reasons) - MAX_ERRORS_SHOWN} more")
    required = parameters.get("required", [])
    names = [n if n in required else f"{n} (optional)" for n in parameters["properties"]]
    return f"{'; '.join(shown)}. The arguments are: {', '.join(names) or 'none'}"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_SHOWN else text[:MAX_VALUE_SHOWN] + "…"


def read_signature(fn: Callable[..., Any], name: str, method: bool = False) -> Signature:
    """Read `fn` once; of a method, `self` is left out. Raises BadTool with one sentence if it cannot be
    offered to a model."""
    docstring = docstring_parser.parse(inspect.getdoc(fn) or "")
    description = "\n".join(filter(None, [docstring.short_description, docstring.long_description]))
    if not description:
        raise BadTool(f"tool {name!r} has no docstring; the model reads it, so say in one line what it does")
    hints = _type_hints(fn, name)
    texts = {p.arg_name: p.description for p in docstring.params if p.description}
    context_parameter = None
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(fn).parameters.values())[1 if method else 0 :]:
        _refuse_kind(parameter, name)
        if parameter.name not in hints:
            raise BadTool(f"tool {name!r}: parameter {parameter.name!r} needs a type hint")
        if _is_context(hints[parameter.name]):
            context_parameter = parameter.name
        else:
            fields[parameter.name] = _field(parameter, hints[parameter.name], texts.get(parameter.name))
    adapter, schema = _adapter(name, fields)
    return Signature(description, schema, context_parameter, adapter)


def _is_context(hint: Any) -> bool:
    """`ToolContext`, also with metadata or `| None`."""
    wrapped = get_origin(hint) in (Annotated, Union, UnionType)
    return hint is ToolContext or (wrapped and any(map(_is_context, get_args(hint))))


def _refuse_kind(parameter: inspect.Parameter, name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        raise BadTool(
            f"tool {name!r}: {stars}{parameter.name} has no schema; name every parameter, "
            "or take one list or dict"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise BadTool(
            f"tool {name!r}: parameter {parameter.name!r} is positional-only, but calls pass "
            "names; remove the /"
        )


def _type_hints(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(fn, include_extras=True)
    except (NameError, SyntaxError, TypeError) as error:
        raise BadTool(
            f"tool {name!r}: a type hint cannot be resolved ({error}); import the type at module level"
        ) from error


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> Any:
    """One entry of the TypedDict. A default is shown to the model if JSON can express it, and accepted when
    the model writes it out: `n: int = None` takes null."""
    if parameter.default is inspect.Parameter.empty:
        return Required[Annotated[hint, Field(description=text)]]
    if parameter.default is None:
        hint = hint | None
    extra: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # an object: the model need only know it is optional
        extra["default"] = json.loads(json.dumps(parameter.default))
    return NotRequired[Annotated[hint, Field(description=text, json_schema_extra=extra)]]


def _adapter(name: str, fields: dict[str, Any]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """The validator and the schema that it keeps."""
    try:
        return _typed_dict(fields)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise BadTool(
            f"tool {name!r}: the type of parameter {_without_form(fields)!r} has no JSON form ({reason})"
        ) from error


def _without_form(fields: dict[str, Any]) -> str:
    """The first field that no schema can be made for."""
    for field, hint in fields.items():
        try:
            _typed_dict({field: hint})
        except (PydanticSchemaGenerationError, PydanticUserError):
            return field
    return ", ".join(fields)


def _typed_dict(fields: dict[str, Any]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    arguments = TypedDict("arguments", fields)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    arguments.__pydantic_config__ = _CONFIG  # pyright: ignore[reportAttributeAccessIssue]
    adapter = TypeAdapter(arguments)
    return adapter, _parameters_schema(adapter)


def _parameters_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    schema = _without_titles(adapter.json_schema())
    schema.setdefault("properties", {})
    return schema


def _without_titles(schema: Any, names: bool = False) -> Any:
    """Pydantic's titles repeat the names at the cost of prompt tokens. `names`: keys are field names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=not names and key in ("properties", "$defs"))
        for key, value in schema.items()
        if names or key != "title"
    }


def _reason(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"]) or "arguments"
    if detail["type"] == "extra_forbidden":
        return f"unknown argument {field!r}"
    if detail["type"] == "missing":
        return f"argument {field!r} is missing"
    message = detail["msg"]
    return f"argument {field!r}: {message[:1].lower()}{message[1:]}, but got {short(detail['input'])}"
