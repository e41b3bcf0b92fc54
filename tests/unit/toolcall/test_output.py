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


def quarters(text: str) -> int:
    """Four characters a unit, as tokens about are."""
    return -(-len(text) // 4)


@given(st.text("ab \n", max_size=200), st.integers(0, 60), st.sampled_from(["head", "tail", "both"]))
def test_a_cut_text_fits_and_loses_no_more_than_it_must(text, budget, keep):
    for measure in (len, quarters):
        cut = cut_to_budget(text, budget, measure, keep)
        assert measure(cut) <= budget
        if measure(text) <= budget:
            assert cut == text


@pytest.mark.parametrize(
    ("keep", "cut"),
    [
        ("head", "0123\n[cut: 56 of 60 characters left out]"),
        ("tail", "[cut: 56 of 60 characters left out]\n6789"),
        ("both", "01\n[cut: 56 of 60 characters left out]\n89"),
    ],
)
def test_the_side_that_is_kept(keep, cut):
    assert cut_to_budget("0123456789" * 6, len(cut), keep=keep) == cut


def test_a_huge_text_is_not_measured_whole():
    measured = []

    def count(text: str) -> int:
        measured.append(len(text))
        return quarters(text)

    cut = cut_to_budget("x" * 5_000_000, 1000, count, "both")
    assert 3900 < len(cut) <= 4000 and max(measured) < 10_000
