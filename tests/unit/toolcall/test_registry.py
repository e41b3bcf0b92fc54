"""What becomes a tool, what its schema says, and which arguments it takes."""

from __future__ import annotations

import asyncio
import enum
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from toolcall import BadTool, InvalidArguments, Tool, ToolContext, load_tools, tool
from toolcall.importing import BadReference


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Place(BaseModel):
    city: str
    title: str = ""


@tool(timeout=3, max_concurrency=2, idempotent=True, retries=1)
async def weather(
    place: Place,
    unit: Unit,
    days: int = 1,
    detail: Literal["low", "high"] | None = None,
    tags: list[str] = [],  # noqa: B006 - read only
    schema: str = "",
    context: ToolContext = ToolContext(),  # noqa: B008 - read only
) -> str:
    """Forecast the weather.

    Args:
        place: Where.
        days: How many days.
    """
    return f"{place.city} {unit.value} {days}"


def test_schema_is_openai_style_with_docstring_texts_and_defaults():
    schema = weather.schema()
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("weather", "Forecast the weather.")
    parameters = function["parameters"]
    assert parameters["required"] == ["place", "unit"]
    assert parameters["properties"]["days"] == {
        "type": "integer",
        "description": "How many days.",
        "default": 1,
    }
    assert parameters["properties"]["place"]["description"] == "Where."
    assert parameters["$defs"]["Unit"]["enum"] == ["celsius", "fahrenheit"]
    assert (
        "title" in parameters["$defs"]["Place"]["properties"]
    )  # a field's name is kept, pydantic's titles not
    assert "title" not in parameters and "title" not in parameters["properties"]["days"]


def test_c9_the_context_parameter_is_not_in_the_schema():
    assert "context" not in weather.schema()["function"]["parameters"]["properties"]
    with pytest.raises(InvalidArguments, match="unknown argument 'context'"):
        weather.validate({"place": {"city": "Rome"}, "unit": "celsius", "context": {}})


def test_c9_an_optional_context_is_the_context_too():
    @tool
    def seen(word: str, context: ToolContext | None = None) -> str:
        """Same."""
        return f"{word} {context.trajectory_id if context else ''}"

    assert list(seen.schema()["function"]["parameters"]["properties"]) == ["word"]
    assert seen.bind({"word": "a"}, ToolContext("t1"))() == "a t1"


def test_a_default_of_none_is_accepted_where_the_model_writes_it_out():
    @tool
    def cut(text: str, width: int = None) -> str:  # noqa: RUF013 # pyright: ignore[reportArgumentType]
        """Same."""
        return text[:width]

    assert cut.schema()["function"]["parameters"]["properties"]["width"]["default"] is None
    assert cut.validate({"text": "a", "width": None}) == {"text": "a", "width": None}
    assert cut.validate({"text": "a", "width": "3"}) == {"text": "a", "width": 3}


def test_numpy_docstrings_describe_parameters():
    @tool
    def look(query: str) -> str:
        """Look.

        Parameters
        ----------
        query : str
            The words.
        """
        return query

    assert look.schema()["function"]["parameters"]["properties"]["query"]["description"] == "The words."


async def _call(fn: Any, **arguments: Any) -> Any:
    return await fn(**arguments)


def test_arguments_are_coerced_to_the_hints():
    arguments = weather.validate({"place": {"city": "Rome"}, "unit": "celsius", "days": "3"})
    assert arguments == {"place": Place(city="Rome"), "unit": Unit.CELSIUS, "days": 3}
    assert asyncio.run(_call(weather, **arguments)) == "Rome celsius 3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"unit": "Celsius"},
            "'unit': input should be 'celsius' or 'fahrenheit', but got 'Celsius'",
        ),
        ({"days": "three"}, "argument 'days': .* but got 'three'"),
        ({"days": 1.5}, "argument 'days': .* but got 1.5"),
        ({"place": {}}, "argument 'place.city' is missing"),
        ({"place": None}, "argument 'place'"),
        ({"detail": "mid"}, "argument 'detail'"),
        ({"tags": "a"}, "argument 'tags'"),
        ({"limit": 3}, "unknown argument 'limit'.* The arguments are: place, unit, days \\(optional\\)"),
    ],
)
def test_c7_refused_arguments_are_named(change, message):
    good = {"place": {"city": "Rome"}, "unit": "celsius"}
    with pytest.raises(InvalidArguments, match=message):
        weather.validate(good | change)


def test_c7_many_errors_and_long_values_stay_short():
    with pytest.raises(InvalidArguments) as error:
        weather.validate({str(number): "x" * 10_000 for number in range(50)})
    assert len(str(error.value)) < 600 and "more" in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(value):
    @tool
    def double(x: float) -> float:
        """Double."""
        return 2 * x

    with pytest.raises(InvalidArguments, match="'x'"):
        double.validate({"x": value})


def test_a_number_for_text_becomes_text():
    @tool
    def look(query: Annotated[str, Field(min_length=1)]) -> str:
        """Look."""
        return query

    assert look.validate({"query": 12}) == {"query": "12"}
    with pytest.raises(InvalidArguments, match="'query'"):
        look.validate({"query": ""})


def test_a_tool_can_be_called_as_the_function_it_was():
    @tool
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert isinstance(add, Tool) and add(2) == 3 and add(2, b=5) == 7


def test_a_tool_without_arguments_has_an_empty_object_schema():
    @tool
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert now.schema()["function"]["parameters"]["properties"] == {}
    assert now.validate({}) == {}


def _no_docstring(x: int) -> int:
    return x


def _stars(*xs: int) -> int:
    """Sum."""
    return sum(xs)


def _double_stars(**xs: int) -> int:
    """Sum."""
    return sum(xs.values())


def _no_hint(x) -> int:
    """Same."""
    return x


def _positional(x: int, /) -> int:
    """Same."""
    return x


def answer(x: int) -> int:
    """Same."""
    return x


def _no_json(x: Tool) -> str:
    """Same."""
    return x.name


def _no_json_schema(y: int, x: Callable[[int], int]) -> int:
    """Same."""
    return x(y)


def _broken_hint(x: "list[int") -> int:  # noqa: F722 # pyright: ignore
    """Same."""
    return x


def _unresolved(x: Nowhere) -> str:  # noqa: F821 # pyright: ignore
    """Same."""
    return str(x)


async def _stream(x: int):
    """Count."""
    yield x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_no_docstring, "no docstring"),
        (_stars, r"\*xs has no schema"),
        (_double_stars, r"\*\*xs has no schema"),
        (_no_hint, "'x' needs a type hint"),
        (_positional, "positional-only"),
        (answer, "is a tag of the call syntax"),
        (_no_json, "type of parameter 'x' has no JSON form"),
        (_no_json_schema, "type of parameter 'x' has no JSON form"),
        (_broken_hint, "'_broken_hint': a type hint cannot be resolved"),
        (_unresolved, "Nowhere"),
        (_stream, "yields"),
        (Place, "give 'city' a default"),
        (3, "takes a function or a class"),
        (lambda x: x, "'<lambda>' must be letters"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_in_one_sentence(fn, message):
    with pytest.raises(BadTool, match=message) as error:
        tool(fn)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0}, "timeout"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"retries": -1}, "retries"),
        ({"retries": 2}, "idempotent"),
        ({"cache": True}, "idempotent"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"name": "two words"}, "letters"),
    ],
)
def test_settings_without_sense_are_refused(limits, message):
    with pytest.raises(BadTool, match=message):
        tool(**limits)(_named)


def _named(x: int) -> int:
    """Same."""
    return x


def test_a_cached_tool_cannot_take_the_context():
    def state(context: ToolContext) -> str:
        """Show."""
        return str(context.state)

    with pytest.raises(BadTool, match="between trajectories"):
        tool(cache=True, idempotent=True)(state)


MODULE = '''
from toolcall import tool
from helper_of_mine import WORD

@tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper() + WORD

def plain(text: str) -> str:
    return text
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module beside its config, with a helper that it imports."""
    (tmp_path / "tools_of_mine.py").write_text(MODULE)
    (tmp_path / "helper_of_mine.py").write_text("WORD = '!'")
    yield tmp_path
    for name in ("tools_of_mine", "helper_of_mine"):
        sys.modules.pop(name, None)


def test_tools_load_from_the_config_folder(module):
    (shout,) = load_tools(["tools_of_mine:shout"], module)
    assert shout("hi") == "HI!"
    assert str(module) not in sys.path


@pytest.mark.parametrize(
    ("references", "error", "message"),
    [
        (["tools_of_mine:plain"], BadTool, "decorate it with @tool"),
        (["tools_of_mine:shout", "tools_of_mine:shout"], BadTool, "two tools are called 'shout'"),
        (["tools_of_mine:shot"], BadReference, "has no 'shot'; it has: .*shout"),
        (["tools_of_mine"], BadReference, "write module:object"),
        (["nowhere_at_all:x"], BadReference, "importing nowhere_at_all failed"),
    ],
)
def test_references_that_lead_nowhere_are_named(module, references, error, message):
    with pytest.raises(error, match=message):
        load_tools(references, module)


def test_a_namesake_loaded_from_elsewhere_is_refused(module, tmp_path_factory):
    load_tools(["tools_of_mine:shout"], module)
    other = tmp_path_factory.mktemp("other")
    (other / "tools_of_mine.py").write_text(MODULE)
    with pytest.raises(BadReference, match="already loaded"):
        load_tools(["tools_of_mine:shout"], other)


def test_options_of_a_run_replace_the_decorators():
    (found,) = load_tools([weather], options={"weather": {"timeout": 9, "retries": 0}})
    assert (found.options.timeout, found.options.retries, found.options.max_concurrency) == (9, 0, 2)
    assert weather.options.timeout == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wether": {}}, "there is no tool 'wether'; did you mean 'weather'"),
        ({"weather": {"timeuot": 1}}, "'weather': there is no option 'timeuot'; did you mean 'timeout'"),
        ({"weather": {"timeout": "5"}}, "'weather': timeout = '5' must be a number"),
        ({"weather": {"max_concurrency": True}}, "max_concurrency = True must be a whole number"),
        ({"weather": {"idempotent": False}}, "retries need idempotent=True"),
    ],
)
def test_m10_options_that_fit_no_tool_are_refused_with_the_nearest(options, message):
    with pytest.raises(BadTool, match=message):
        load_tools([weather], options=options)
