"""Rule rewards: answers from the model's own words, and what counts as a good call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.conduct import (
    answer_format,
    no_wasted_calls,
    overlong,
    tool_efficiency,
    well_formed_calls,
)
from tasks.rules import (
    exact_match,
    extract_answer,
    final_text,
    json_schema,
    made_calls,
    numeric_match,
    regex_match,
    same_number,
    same_text,
    token_f1,
)
from tests.unit.tasks.support import episode, result
from toolcall import Outcome
from toolcall.parsers import make_parser
from toolcall.types import ParsedTurn


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        (["<answer> 84 </answer>"], "84"),
        (["<answer>1</answer> no: <answer>2</answer>"], "2"),
        (["<answer>1</answer>", "then <answer>2</answer>"], "2"),
        (["<answer>1</answer>", "well"], "1"),
        (["<answer>1<answer>2</answer>"], "2"),
        (["<answer>a\nb</answer>"], "a\nb"),
        (["84"], None),
        (["<answer>84"], None),
        (["<answer>", "84</answer>"], None),  # not within one turn: a tool wrote in between
        (["<think><answer>84</answer></think>"], None),
        (["maybe <answer>1</answer></think><answer>2</answer>"], "2"),
    ],
)
def test_the_answer_is_the_last_one_outside_thinking(turns, answer):
    assert extract_answer(episode(*turns)) == answer


def test_an_answer_in_a_section_that_the_prompt_opened_and_nothing_closed_is_no_answer():
    """As a template of a thinking model opens it: a turn cut in its thinking must not earn the reward."""
    thought = episode("84, so <answer>84</answer> ends it. Wait,")
    thought = replace(thought, parsed=(ParsedTurn(thinking=True),))
    assert extract_answer(thought) is None and final_text(thought) == ""
    assert exact_match(thought, "84") == answer_format(thought) == 0.0
    closed = replace(thought, turns=("<answer>8</answer></think><answer>84</answer>",))
    assert extract_answer(closed) == final_text(closed)[8:10] == "84" and answer_format(closed) == 1.0


def test_r4_an_answer_in_tool_text_is_no_answer():
    told = episode(("<calc>12*7</calc>", result("<answer>84</answer>")), "I am done.")
    assert extract_answer(told) is None
    assert exact_match(told, "84") == numeric_match(told, "84") == 0.0
    assert answer_format(told) == regex_match(told, "84") == json_schema(told, {"type": "integer"}) == 0.0
    assert "<answer>84</answer>" not in told.text and "<answer>84</answer>" in told.transcript


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("The Beatles!", "beatles", True),
        ("an  apple", "Apple", True),
        ("ｆｕｌｌ", "full", True),
        ("Paris", ["London", "paris"], True),
        ("84", 84, True),
        ("Parisian", "Paris", False),
        ("", "Paris", False),
        ("a", "A", True),  # of a choice nothing but the article is left
        ("", "A", False),
        ("the", "A", False),
        ("...", "A", False),
        ("+", "-", False),
        ("-5", "5", False),
        ("1.5", "15", False),
        (".5", "5", False),
        ("3/4", "34", False),
        ("3-2", "32", False),
        ("1,2", "12", False),
        ("−5", "-5", True),
        ("1,200.5 km.", "1200.5 km", True),
        ("ca. 1990.", "ca 1990", True),
        ("1990–95", "1990-95", True),
        ("U.S.", "us", True),
    ],
)
def test_texts_are_compared_after_normalisation(given, expected, same):
    assert same_text(given, expected) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("84", "84", True),
        ("84.0 apples", 84, True),
        ("$1,200", "1200", True),
        ("-3", -3, True),
        ("−3", -3, True),
        ("−3", 3, False),
        ("3", "−3", False),
        ("1.2e3", 1200, True),
        ("1\u202f200 km", "1\u00a0200", True),
        ("1e999", 1200, False),
        ("0.3333333", 1 / 3, True),
        ("83 or 84", "84", False),  # a list of guesses is no answer
        ("eighty-four", "84", False),
        ("84.1", "84", False),
        ("", "84", False),
    ],
)
def test_one_number_is_compared(given, expected, same):
    assert same_number(given, expected) is same


def test_well_formed_calls_are_a_share():
    outcomes = (Outcome.OK, Outcome.TOOL_ERROR, Outcome.PARSE_ERROR, Outcome.UNKNOWN_TOOL)
    made = episode(*(("x", result(outcome=outcome)) for outcome in outcomes))
    assert well_formed_calls(made) == 0.5
    assert well_formed_calls(episode("x")) == 0.0


@pytest.mark.parametrize(
    ("results", "value"),
    [
        ([], 0.0),
        ([result("1")], 1.0),
        ([result("1"), result("2", number=1)], 1.0),
        ([result("1"), result("1", number=1)], 0.0),
        ([result("1"), result("no", Outcome.TOOL_ERROR, 1)], 0.0),
    ],
)
def test_no_wasted_calls(results, value):
    assert no_wasted_calls(episode(("x", *results))) == value


def test_calls_are_paired_with_their_results_by_id():
    parser = make_parser("tag", tags={"calc": ("calculator", "expression")})
    made = episode(
        ("<calc>1+1</calc><calc>2+2</calc>", result("2"), result("4", number=1)),
        ("<calc>3+3</calc>", result("6")),
        "<calc>4+4",  # cut, never answered
    )
    pairs = [(call.arguments["expression"], answer.text) for call, answer in made_calls(made, parser)]
    assert pairs == [("1+1", "2"), ("2+2", "4"), ("3+3", "6")]


@pytest.mark.parametrize(
    ("given", "expected", "value"),
    [
        ("the Eiffel Tower in Paris", "Eiffel Tower", 2 * 2 / (4 + 2)),
        ("Paris Paris", "Paris", 2 / 3),  # repeating a word earns nothing
        ("London", "Paris", 0.0),
        ("London", ["Paris", "london"], 1.0),
        ("the", "Paris", 0.0),
        ("the", "a", 0.0),
        ("", [], 0.0),
    ],
)
def test_f1_counts_common_words(given, expected, value):
    assert token_f1(given, expected) == pytest.approx(value)


def test_an_answer_may_stand_in_another_tag_or_be_the_whole_last_turn():
    assert exact_match(episode("<final>84</final>"), "84", tag="final") == 1.0
    assert exact_match(episode("x", "<think>85</think> 84"), "84", tag="") == 1.0
    assert exact_match(episode("84", "x"), "84", tag="") == 0.0
    assert exact_match(episode(), "84", tag="") == 0.0


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"n": 1}', True),
        ('Here:\n```json\n{"n": 1}\n```', True),
        ('{"n": "1"}', False),
        ('{"n": 1', False),
        ('Here: {"n": 1}', False),
        ("[" * 100_000, False),
    ],
)
def test_json_under_a_schema(text, valid):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert json_schema(episode(text), schema) == float(valid)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"x": [NaN]}'])
def test_numbers_that_json_has_not_are_no_json(text):
    assert json_schema(episode(text), {}) == 0.0


@pytest.mark.parametrize(
    ("turns", "value"),
    [
        (["<calc>1</calc>", "So <answer>84</answer>"], 1.0),
        (["<think><answer>1</answer></think><answer>84</answer>\n"], 1.0),
        (["<answer>84</answer> indeed"], 0.0),
        (["<answer>1</answer>", "<answer>84</answer>"], 0.0),
        (["<answer></answer>"], 0.0),
        (["<answer>\n</answer>"], 0.0),
        (["</answer><answer>"], 0.0),
        ([], 0.0),
    ],
)
def test_the_answer_format_is_one_answer_at_the_end(turns, value):
    assert answer_format(episode(*turns)) == value


@pytest.mark.parametrize(
    ("results", "needed", "value"),
    [
        ([], 0, 1.0),
        ([], 1, 0.0),
        ([result()], 1, 1.0),
        ([result()], 3, 1.0),
        ([result(), result(number=1)], 1, 0.5),
        ([result("no", Outcome.TOOL_ERROR)], 1, 0.0),
    ],
)
def test_tool_efficiency(results, needed, value):
    assert tool_efficiency(episode(("x", *results)), needed) == value


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (500, -1)])
def test_overlong_falls_linearly_to_its_limit(tokens, value):
    assert overlong(replace(episode("x"), num_tokens=tokens), limit=100, margin=20) == value
    with pytest.raises(ValueError, match="margin = 200"):
        overlong(episode("x"), limit=100, margin=200)
