"""Mathematical equivalence: the library in its worker processes, and what no answer can do to us."""

from __future__ import annotations

import pytest

from tasks import Unscorable, mathematics
from tasks.mathematics import math_match, same_value
from tests.unit.tasks.support import episode

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("given", "expected", "equal"),
    [
        ("0.5", "1/2", True),
        (r"\frac{1}{2}", "$0.5$", True),
        ("$(x+1)^2$", "x^2+2x+1", True),
        ("42 apples", "42", True),
        ("3 or 4", "4", False),
        (r"\$3 or \$4", "4", False),
        (r"\$5", "5", True),
        ("1,500", r"\$1{,}500", True),
        ("banana", "3", False),
        ("", "3", False),
    ],
)
def test_equal_values_are_equal_however_written(given, expected, equal):
    assert same_value(given, expected) is equal


def test_the_answer_is_the_models_own_tag_or_box():
    assert math_match(episode("<answer>0.5</answer>"), "1/2") == 1.0
    assert math_match(episode(r"so \boxed{0.5}"), "1/2", tag="") == 1.0
    assert math_match(episode("no tag: 0.5"), "1/2") == 0.0


def test_r3_a_rows_answer_that_is_no_mathematics_is_unscorable():
    with pytest.raises(Unscorable, match="the row's answer '' cannot be read"):
        same_value("3", "")


def test_r3_a_hostile_answer_ends_at_the_deadline_unscored_and_the_next_is_scored(monkeypatch):
    monkeypatch.setattr(mathematics, "EQUIVALENCE_S", 0.2)
    with pytest.raises(Unscorable, match=r"'9\^.* was not compared within 0.2 s"):
        same_value("9^{9^{9^{9}}}", "7")
    monkeypatch.undo()
    assert same_value("3", "3") is True
