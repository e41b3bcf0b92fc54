"""Arguments by a JSON schema that is given, as an MCP server gives one, instead of type hints.

Invariant: the model is shown the given schema as it is, and what passes here is valid under it. Values of
the wrong type with only one sensible reading are mended (`"3"` for an integer), as type hints do it.
Called by `toolcall.registry.schema_tool`.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

from jsonschema import ValidationError
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from toolcall.errors import BadTool, InvalidArguments
from toolcall.signature import MAX_ERRORS_SHOWN, explain, short
from toolcall.types import ToolContext

_NOT_FETCHED: Registry[Any] = Registry()  # jsonschema's own default would fetch references from the network


class SchemaArguments:
    """`toolcall.signature.Arguments` by a JSON schema. The function takes (arguments, context)."""

    takes_context = True

    def __init__(self, tool: str, description: str, parameters: dict[str, Any]) -> None:
        if parameters.get("type", "object") != "object":
            raise BadTool(f"tool {tool!r}: its schema describes {parameters['type']!r}, not an object")
        self.description = description
        self.parameters = {"type": "object", "properties": {}, **parameters}
        kind = validator_for(self.parameters, default=Draft202012Validator)
        try:
            kind.check_schema(self.parameters)
        except SchemaError as error:
            raise BadTool(
                f"tool {tool!r}: its schema is not valid at {error.json_path} ({error.message})"
            ) from error
        _refuse_unresolvable(tool, self.parameters)
        self._validator: Validator = kind(self.parameters, registry=_NOT_FETCHED)

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        errors = list(self._validator.iter_errors(arguments))
        if errors and (mended := _mended(arguments, errors)) is not None:
            arguments, errors = mended, list(self._validator.iter_errors(mended))
        if errors:
            raise InvalidArguments(explain(_reasons(errors), self.parameters))
        _refuse_infinite(arguments)
        return arguments

    def canonical(self, arguments: dict[str, Any]) -> str:
        return json.dumps(arguments, sort_keys=True)

    def bind(
        self, fn: Callable[..., Any], arguments: dict[str, Any], context: ToolContext
    ) -> Callable[[], Any]:
        return functools.partial(fn, arguments, context)


def _refuse_unresolvable(tool: str, schema: dict[str, Any]) -> None:
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise BadTool(f"tool {tool!r}: its schema refers to {reference!r}, which is not in it") from error


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _mended(arguments: dict[str, Any], errors: list[ValidationError]) -> dict[str, Any] | None:
    """A copy in which text that reads as the wanted type has become it, and numbers text. None: no such."""
    mended = copy.deepcopy(arguments)
    changed = False
    for error, wanted in _wrong_types(errors):
        value = _read_as(wanted, error.instance)
        if error.absolute_path and value is not None:
            *parents, last = error.absolute_path
            holder: Any = mended
            for part in parents:
                holder = holder[part]
            holder[last] = value
            changed = True
    return mended if changed else None


def _wrong_types(errors: Iterable[ValidationError]) -> Iterable[tuple[ValidationError, list[str]]]:
    """Where a value has none of the JSON types that it may have; of alternatives all of theirs."""
    for error in errors:
        if error.validator == "type":
            wanted: Any = error.validator_value
            yield error, wanted if isinstance(wanted, list) else [wanted]
        elif error.context:
            inner = list(_wrong_types(error.context))
            here = [wanted for each, wanted in inner if not each.relative_path]
            if here:
                yield error, [kind for wanted in here for kind in wanted]
            yield from ((each, wanted) for each, wanted in inner if each.relative_path)


def _read_as(wanted: list[str], value: Any) -> Any:
    """wanted: JSON types."""
    if isinstance(value, int | float) and not isinstance(value, bool) and "string" in wanted:
        return str(value)
    if not isinstance(value, str):
        return None
    try:
        read = json.loads(value.lower() if "boolean" in wanted else value)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(read, str) else read  # a wrong one is refused by the schema again


def _refuse_infinite(arguments: dict[str, Any]) -> None:
    """Python reads `NaN` and `1e999` as numbers; JSON has none such, and no server takes them."""
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        raise InvalidArguments("NaN and Infinity are no JSON numbers; give a finite one") from None


def _reasons(errors: list[ValidationError]) -> list[str]:
    reasons: dict[str, None] = {}  # in order, without repeats
    for error in errors[: 2 * MAX_ERRORS_SHOWN]:
        found = best_match([error]) or error  # the closest alternative of an anyOf
        reasons.update(dict.fromkeys(_reason(found)))
    return list(reasons)


def _reason(error: ValidationError) -> Iterable[str]:
    path = [str(part) for part in error.absolute_path]
    if error.validator == "required" and isinstance(error.instance, dict):
        for name in cast(list[str], error.validator_value):
            if name not in error.instance:
                yield f"argument {'.'.join([*path, name])!r} is missing"
    elif error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        for name in error.instance:
            if name not in known:
                yield f"unknown argument {'.'.join([*path, name])!r}"
    else:
        yield f"argument {'.'.join(path) or 'arguments'!r}: {_wish(error)}, but got {short(error.instance)}"


def _wish(error: ValidationError) -> str:
    wanted: Any = error.validator_value
    if error.validator == "type":
        return f"input should be {' or '.join(wanted) if isinstance(wanted, list) else wanted}"
    if error.validator == "enum":
        return f"input should be one of {', '.join(map(repr, wanted))}"
    if error.validator in ("anyOf", "oneOf"):
        return "input fits none of the alternatives"
    return f"input must satisfy {error.validator} = {short(wanted)}"
