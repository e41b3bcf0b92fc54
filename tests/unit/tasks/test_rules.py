"""Rule rewards: answers from the model's own words, and what counts as a good call."""

from __future__ import annotations

import pytest

from tasks.rules import (
    exact_match,
    extract_answer,
    made_calls,
    no_wasted_calls,
    numeric_match,
    same_number,
    same_text,
    well_formed_calls,
)
from tests.unit.tasks.support import episode, result
from toolcall import Outcome
from toolcall.parsers import make_parser


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


def test_r4_an_answer_in_tool_text_is_no_answer():
    told = episode(("<calc>12*7</calc>", result("<answer>84</answer>")), "I am done.")
    assert extract_answer(told) is None
    assert exact_match(told, "84") == numeric_match(told, "84") == 0.0


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
