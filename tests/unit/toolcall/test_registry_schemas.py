"""Tools described by a JSON schema: arguments are checked by the schema as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.toolcall.support import executor_for, run_virtual, turn
from toolcall import BadTool, InvalidArguments, Outcome, ToolContext, load_tools, schema_tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/place"},
        "when": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
        "exact": {"type": "boolean"},
        "limit_mm": {
            "anyOf": [{"type": "integer"}, {"type": "null"}]
        },  # an optional one, as MCP servers say it
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "hours": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x", "y"]}},
}


async def _echo(arguments: dict[str, Any], context: ToolContext) -> dict[str, Any]:
    return {"got": arguments, "by": context.trajectory_id}


weather = schema_tool("weather", "Forecast.", SCHEMA, _echo, timeout=3, idempotent=True)


def test_the_schema_is_shown_as_it_is():
    function = weather.schema()["function"]
    assert function == {"name": "weather", "description": "Forecast.", "parameters": SCHEMA}
    assert weather.options.timeout == 3 and load_tools([weather]) == [weather]


def test_a_call_goes_through_the_executor_with_its_context():
    executor = executor_for(weather)
    calls = turn(("weather", {"city": "Rome", "days": "2"}), ("weather", {"town": "Rome"}))
    good, bad = run_virtual(executor.run(calls, ToolContext(trajectory_id="t")))
    assert good.text == '{"got": {"city": "Rome", "days": 2}, "by": "t"}'
    assert bad.outcome is Outcome.INVALID_ARGUMENTS
    assert bad.text.startswith("weather: argument 'city' is missing; unknown argument 'town'. The arguments")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"days": "3"}, {"days": 3}),
        ({"city": 12}, {"city": "12"}),
        ({"exact": "True"}, {"exact": True}),
        ({"place": '{"x": 1, "y": 2}'}, {"place": {"x": 1, "y": 2}}),
        ({"place": {"x": "1.5", "y": 0}}, {"place": {"x": 1.5, "y": 0}}),
        ({"limit_mm": "3"}, {"limit_mm": 3}),
        ({"note": 5}, {"note": "5"}),
        ({"hours": "[1, 2]"}, {"hours": [1, 2]}),
        ({"hours": ["1", 2]}, {"hours": [1, 2]}),
        ({"when": '{"x": 1, "y": 2}'}, {"when": {"x": 1, "y": 2}}),
    ],
)
def test_c7_a_value_with_one_sensible_reading_is_mended(given, taken):
    given = {"city": "Rome", **given}
    before = repr(given)
    assert weather.validate(given) == {"city": "Rome", **taken}
    assert repr(given) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"days": "three"}, "argument 'days': input should be integer, but got 'three'"),
        ({"days": 0}, "argument 'days': input must satisfy minimum = 1, but got 0"),
        ({"unit": "C"}, "argument 'unit': input should be one of 'c', 'f', but got 'C'"),
        ({"place": {"x": 1}}, "argument 'place.y' is missing"),
        ({"when": {"x": 1}}, "argument 'when.y' is missing"),
        ({"city": None}, "argument 'city': input should be string, but got None"),
        ({"limit_mm": "three"}, "argument 'limit_mm': input .*but got 'three'"),
        ({"limit": 3}, r"unknown argument 'limit'.* The arguments are: city, days \(optional\)"),
    ],
)
def test_c7_refused_arguments_are_named(change, message):
    with pytest.raises(InvalidArguments, match=message) as error:
        weather.validate({"city": "Rome", **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "[1, NaN]", float("inf")])
def test_c7_numbers_that_json_has_not_are_refused(value):
    either = {"type": ["number", "array"]}
    tool = schema_tool("take", "Take.", {"type": "object", "properties": {"x": either}}, _echo)
    with pytest.raises(InvalidArguments, match="NaN and Infinity are no JSON numbers"):
        tool.validate({"x": value})


def test_c7_many_errors_and_long_values_stay_short():
    with pytest.raises(InvalidArguments) as error:
        weather.validate({str(number): "x" * 10_000 for number in range(50)})
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array"}, "describes 'array', not an object"),
        ({"properties": {"x": {"type": "integr"}}}, r"not valid at \$.properties.x.type"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "refers to '#/\\$defs/none', which is not in it"),
        ({"properties": {"x": {"$ref": "http://example.com/x.json"}}}, "which is not in it"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused(schema, message):
    with pytest.raises(BadTool, match=message) as error:
        schema_tool("broken", "Broken.", schema, _echo)
    assert "\n" not in str(error.value)


def test_the_executor_closes_what_tools_share_once_whatever_another_raises():
    closed = []

    async def fail() -> None:
        raise RuntimeError("already gone")

    async def shutdown() -> None:
        closed.append("server")

    shared = [schema_tool(name, "Work.", {}, _echo, shutdown=shutdown) for name in ("a", "b")]
    run_virtual(executor_for(*shared, schema_tool("c", "Work.", {}, _echo, shutdown=fail)).close())
    assert closed == ["server"]
