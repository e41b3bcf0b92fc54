"""How a tool's return value becomes text, and how text is cut."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from toolcall import ToolError, cut_to_budget
from toolcall.output import to_text


class Point(BaseModel):
    x: int


@dataclasses.dataclass
class Image:
    pixels: bytes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é", "é"),
        ("", ""),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        (None, "(the tool returned nothing)"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ((1, 2), "[1, 2]"),
        (Point(x=1), '{"x": 1}'),
        ([Point(x=1)], '[{"x": 1}]'),
        ("half \ud800", "half ?"),
    ],
)
def test_c8_values_become_text_in_a_stated_form(value, text):
    assert to_text(value) == text


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"12345", "bytes of 5 bytes"),
        (Image(b""), "Image"),
        ({"image": b"12"}, "bytes of 2 bytes inside its result"),
        ({1, 2}, "set"),
        (LOOP, "list"),
        ({(1, 2): 3}, "dict"),
    ],
)
def test_c8_what_has_no_text_is_refused_by_its_type(value, says):
    with pytest.raises(ToolError, match=says):
        to_text(value)


def test_c8_five_megabytes_are_cut_with_a_note_of_how_much():
    cut = cut_to_budget("x" * 5_000_000, 1000)
    kept = cut.count("x")
    assert len(cut) <= 1000 and kept > 900
    assert cut.endswith(f"\n[cut: {5_000_000 - kept} of 5000000 characters left out]")


def words(text):
    return len(text.split())


@given(st.text("ab \n", max_size=200), st.integers(0, 60))
def test_a_cut_text_fits_and_loses_no_more_than_it_must(text, budget):
    for measure in (len, words):
        cut = cut_to_budget(text, budget, measure)
        assert measure(cut) <= budget
        if measure(text) <= budget:
            assert cut == text


def test_the_note_counts_in_the_unit_of_the_measure():
    cut = cut_to_budget("a b c d e f g h i j k l", 10, words, "words")
    assert cut == "a b c \n[cut: 9 of 12 words left out]"
