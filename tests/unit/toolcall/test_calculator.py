"""The calculator: exact values, plain print, clear errors, bounded work."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.toolcall.support import executor_for, run_one
from toolcall import Outcome, ToolError
from toolcall.tools.calculator import calculator, evaluate, show


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("12*7", "84"),
        ("(12+8)*3 - 4/2", "58"),
        ("1,200 + 3", "1203"),
        ("1,234,567.5*2", "2469135"),
        ("25/2", "12.5"),
        ("3.0*4", "12"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("2/3", "0.6666666667"),
        ("1/7*7", "1"),
        ("1/10**20", "1e-20"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%4", "3"),
        ("7 % -4", "-1"),
        ("20% * 50", "10"),
        ("(50%)", "0.5"),
        ("2**10", "1024"),
        ("2^3^2", "512"),
        ("-2**2", "-4"),
        ("2**-2", "0.25"),
        ("2**0.5", "1.4142135624"),
        ("0**5", "0"),
        ("(-1)**1000001", "-1"),
        ("12 × 7 ÷ 2 − 1", "41"),
        ("--5", "5"),
        (".5*2", "1"),
        ("10**30", "1" + "0" * 30),
        ("10**20+1/2", "100000000000000000000.5"),
    ],
)
def test_values_are_exact_and_printed_plainly(expression, text):
    assert show(evaluate(expression)) == text


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1/0", "division by zero"),
        ("5 % (2-2)", "division by zero"),
        ("0**-1", "division by zero"),
        ("", "empty"),
        ("1+", "ends too early"),
        ("*3", "'\\*' is in the wrong place"),
        ("1 2", "'2' is in the wrong place"),
        ("(1+2", "never closed"),
        ("1+2)", "'\\)' is in the wrong place"),
        ("1,20+1", "'1,20' cannot be read"),
        ("1.2.3", "'1.2.3' cannot be read"),
        ("apples*3", "'apples' cannot be read"),
        ("__import__('os')", "__import__"),
        ("'a'*10**9", "cannot be read"),
        ("0x10", "x10"),
        ("(-8)**(1/3)", "no fractional power"),
        ("9**9**9", "too large"),
        ("2**99999", "too large"),
        ("10**300*10**300", "too large"),
        ("9.5**9999.5", "too large"),
        ("9" * 350, "too large"),
        ("1+" * 300 + "1", "601 characters"),
        ("(" * 60 + "1" + ")" * 60, "nested"),
        ("2" + "**2" * 60, "nested|too large"),
    ],
)
def test_what_cannot_be_computed_says_why(expression, says):
    with pytest.raises(ToolError, match=says):
        evaluate(expression)


@given(st.text(alphabet="0123456789.,+-*/%^() x", max_size=60))
def test_no_expression_crashes_or_runs_away(expression):
    try:
        text = show(evaluate(expression))
    except ToolError:
        return
    assert len(text) < 700


def test_it_is_a_tool():
    executor = executor_for(calculator)
    assert asyncio.run(run_one(executor, calculator, expression="12*7")).text == "84"
    failed = asyncio.run(run_one(executor, calculator, expression="1/0"))
    assert (failed.outcome, failed.text) == (Outcome.TOOL_ERROR, "division by zero")
