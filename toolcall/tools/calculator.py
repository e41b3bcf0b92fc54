"""Arithmetic as a tool: exact, bounded, with errors that a model can act on.

Invariant: no input runs code or takes more than a few milliseconds; every intermediate value stays within
`MAX_BITS`. Numbers are fractions, so 0.1+0.2 is 0.3 and integers are exact. Used by the calculator task.

    sum     := product (("+" | "-") product)*
    product := signed (("*" | "/" | "//" | "%") signed)*
    signed  := ("+" | "-") signed | power
    power   := atom (("**" | "^") signed)?
    atom    := number "%"? | "(" sum ")"
"""

from __future__ import annotations

import decimal
import math
import re
from fractions import Fraction

from toolcall.errors import ToolError
from toolcall.registry import tool

MAX_CHARS = 400
MAX_DEPTH = 50
MAX_BITS = 1024  # of a numerator or denominator: about 300 digits
MAX_DECIMALS = 10  # shown of a result that does not end

_TOKEN = re.compile(
    r"\s*(?:(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?![\d.]|,\d)|(\*\*|//|[-+*/%^()])|([\d.,]+|\S))", re.ASCII
)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


@tool(timeout=5, max_concurrency=64, idempotent=True)
async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example (12+8)*3.
    """
    return show(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value; a fractional power is rounded to a float. Raises ToolError saying what is wrong."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    reader = _Expression(expression.translate(_SPELLINGS))
    value = reader.sum(depth=0)
    reader.end()
    return value


def show(value: Fraction) -> str:
    """84, 12.5 or 0.3333333333: no trailing zeros, no exponent."""
    if value.denominator == 1:
        return str(value.numerator)
    whole_digits = len(str(abs(int(value))))
    with decimal.localcontext(prec=whole_digits + MAX_DECIMALS + 30):
        exact = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
        text = f"{exact:.{MAX_DECIMALS}f}".rstrip("0").rstrip(".")
    if text in ("0", "-0"):
        return f"{float(value):.{MAX_DECIMALS}g}"  # too small for plain decimals
    return text


class _Expression:
    """A recursive-descent reader that computes as it reads."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        for number, operator, other in _TOKEN.findall(text):
            if other:
                raise ToolError(_cannot_read(text, other))
            self._tokens.append(number or operator)
        if not self._tokens:
            raise ToolError("the expression is empty")
        self._next = 0

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ToolError(f"more than {MAX_DEPTH} levels are nested")
        value = self._product(depth)
        while operator := self._take("+", "-"):
            right = self._product(depth)
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def end(self) -> None:
        if self._next < len(self._tokens):
            raise ToolError(f"{self._tokens[self._next]!r} is in the wrong place")

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while operator := self._take("*", "//", "/", "%"):
            value = _bounded(_multiplicative(operator, value, self._signed(depth)))
        return value

    def _signed(self, depth: int) -> Fraction:
        sign = 1
        while operator := self._take("+", "-"):
            sign = -sign if operator == "-" else sign
        return sign * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if not self._take("**", "^"):
            return base
        if depth > MAX_DEPTH:
            raise ToolError(f"more than {MAX_DEPTH} levels are nested")
        return _raise_to(base, self._signed(depth + 1))

    def _atom(self, depth: int) -> Fraction:
        if self._next == len(self._tokens):
            raise ToolError("the expression ends too early")
        token = self._tokens[self._next]
        self._next += 1
        if token == "(":
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise ToolError("a ( is never closed")
        elif token[0].isdigit() or token[0] == ".":
            value = _bounded(Fraction(token.replace(",", "")))
        else:
            raise ToolError(f"{token!r} is in the wrong place")
        return value / 100 if self._take_percent() else value

    def _take(self, *operators: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in operators:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _take_percent(self) -> bool:
        """`%` with no operand after it means hundredths; `10 % 3` is a remainder."""
        following = self._tokens[self._next : self._next + 2]
        if not following or following[0] != "%":
            return False
        if len(following) == 2 and (following[1] in "(+-" or following[1][0] in ".0123456789"):
            return False
        self._next += 1
        return True


def _multiplicative(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "*":
        return left * right
    if right == 0:
        raise ToolError("division by zero")
    if operator == "/":
        return left / right
    return Fraction(left // right) if operator == "//" else left % right


def _raise_to(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    if exponent.denominator == 1:
        return _whole_power(base, exponent.numerator)
    if base < 0:
        raise ToolError("a negative number has no fractional power")
    try:
        return Fraction(math.pow(base, exponent))
    except OverflowError:
        raise ToolError("the result is too large") from None


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    if base in (1, -1):
        exponent %= 2
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * (bits - 1) > MAX_BITS:  # a lower bound of the result's size, known before computing it
        raise ToolError("the result is too large")
    return _bounded(base**exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the numbers become too large")
    return value


def _cannot_read(text: str, part: str) -> str:
    word = re.search(r"[A-Za-z_]\w*", text)
    return f"{(word[0] if word else part)!r} cannot be read; write numbers and + - * / ( ) only"
