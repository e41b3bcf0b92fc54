"""Arithmetic word problems with integer answers, made from a seed.

Invariant: problem `i` of a seed is the same on every machine, in any order of access; a problem's text
alone decides on which side of the split it can appear, so no training problem of any seed is held out.
Called by `tasks.calculator`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import overload

from tasks.types import Row
from toolcall.tools.calculator import evaluate, show

HELD_OUT_SHARE = 8  # one text in this many is on the held-out side

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Kim", "Leo")
THINGS = (
    "apples",
    "books",
    "stamps",
    "marbles",
    "cards",
    "shells",
    "coins",
    "pencils",
    "stickers",
    "cookies",
)

Numbers = dict[str, int]


@dataclass(frozen=True)
class Structure:
    """Problems that are solved by the same expression. `draw` gives its numbers, `texts` its wordings."""

    expression: str
    draw: Callable[[Random], Numbers]
    texts: tuple[str, ...]

    @property
    def operations(self) -> int:
        return len(re.findall(r"[-+*/]", self.expression))


def _sum(rng: Random) -> Numbers:
    return {"a": rng.randint(12, 480), "b": rng.randint(11, 390)}


def _difference(rng: Random) -> Numbers:
    a = rng.randint(40, 600)
    return {"a": a, "b": rng.randint(11, a - 8)}


def _product(rng: Random) -> Numbers:
    return {"a": rng.randint(3, 40), "b": rng.randint(6, 60)}


def _quotient(rng: Random) -> Numbers:
    b = rng.randint(3, 16)
    return {"a": b * rng.randint(6, 48), "b": b}


def _sum_less(rng: Random) -> Numbers:
    a, b = rng.randint(20, 300), rng.randint(11, 200)
    return {"a": a, "b": b, "c": rng.randint(9, a + b - 5)}


def _loss_gain(rng: Random) -> Numbers:
    return {**_difference(rng), "c": rng.randint(11, 200)}


def _product_more(rng: Random) -> Numbers:
    return {**_product(rng), "c": rng.randint(7, 150)}


def _product_less(rng: Random) -> Numbers:
    a, b = rng.randint(4, 30), rng.randint(8, 40)
    return {"a": a, "b": b, "c": rng.randint(5, a * b - 6)}


def _shared_sum(rng: Random) -> Numbers:
    c, a = rng.randint(3, 9), rng.randint(15, 60)
    total = c * rng.randint(a // c + 4, a // c + 40)
    return {"a": a, "b": total - a, "c": c}


def _shared_rest(rng: Random) -> Numbers:
    c, b = rng.randint(3, 9), rng.randint(5, 40)
    return {"a": b + c * rng.randint(4, 30), "b": b, "c": c}


def _two_products(rng: Random) -> Numbers:
    return {key: rng.randint(*span) for key, span in zip("abcd", ((3, 20), (4, 30)) * 2, strict=True)}


def _product_two_less(rng: Random) -> Numbers:
    numbers = _product_less(rng)
    rest = numbers["a"] * numbers["b"] - numbers["c"]
    return {**numbers, "d": rng.randint(2, rest - 2)}


def _three_less(rng: Random) -> Numbers:
    a, b, c = (rng.randint(15, 200) for _ in range(3))
    return {"a": a, "b": b, "c": c, "d": rng.randint(9, a + b + c - 10)}


def _shared_product_sum(rng: Random) -> Numbers:
    a, b, d = rng.randint(3, 12), rng.randint(4, 20), rng.randint(2, 8)
    return {"a": a, "b": b, "c": d * rng.randint(1, 20) + (-a * b) % d, "d": d}


ONE_STEP = (
    Structure(
        "a+b",
        _sum,
        (
            "{n} has {a} {things} and buys {b} more. How many {things} does {n} have now?",
            "There are {a} {things} in one box and {b} in another. How many {things} are there in all?",
            "A shop sold {a} {things} on Monday and {b} on Tuesday. How many {things} did it sell?",
            "{n} counted {a} {things} and {m} counted {b}. How many did they count together?",
            "What is {a} plus {b}?",
            "{n} adds {a} and {b}. What is the sum?",
        ),
    ),
    Structure(
        "a-b",
        _difference,
        (
            "{n} had {a} {things} and gave {b} to {m}. How many {things} are left?",
            "A crate holds {a} {things}, but {b} are broken. How many are not broken?",
            "{n} has {a} {things} and {m} has {b}. How many more does {n} have?",
            "A trip is {a} miles long. {n} has driven {b} miles. How many miles remain?",
            "What is {a} minus {b}?",
            "{n} starts with {a} and takes away {b}. What is left?",
        ),
    ),
    Structure(
        "a*b",
        _product,
        (
            "There are {a} boxes with {b} {things} each. How many {things} are there?",
            "{n} reads {b} pages a day for {a} days. How many pages is that?",
            "A hall has {a} rows of {b} seats. How many seats does it have?",
            "{n} buys {a} tickets for {b} dollars each. How much does {n} pay?",
            "What is {a} times {b}?",
            "{n} multiplies {a} by {b}. What is the product?",
        ),
    ),
    Structure(
        "a/b",
        _quotient,
        (
            "{n} shares {a} {things} equally among {b} friends. How many does each friend get?",
            "{n} packs {a} {things} into bags of {b}. How many bags are filled?",
            "{b} tickets cost {a} dollars in all. How much is one ticket?",
            "What is {a} divided by {b}?",
            "{n} divides {a} by {b}. What is the result?",
        ),
    ),
)
TWO_STEPS = (
    Structure(
        "a+b-c",
        _sum_less,
        (
            "{n} had {a} {things}, got {b} more and then lost {c}. How many {things} are left?",
            "A bus carried {a} people. {b} got on and {c} got off. How many are on the bus?",
            "What is {a} plus {b} minus {c}?",
            "{n} adds {a} and {b}, then takes away {c}. What is left?",
        ),
    ),
    Structure(
        "a-b+c",
        _loss_gain,
        (
            "A store had {a} {things}, sold {b} and received {c} new ones. How many does it have now?",
            "{n} had {a} dollars, spent {b} and earned {c}. How many dollars does {n} have?",
            "What is {a} minus {b} plus {c}?",
        ),
    ),
    Structure(
        "a*b+c",
        _product_more,
        (
            "{n} has {a} boxes of {b} {things} and {c} loose {things}. How many {things} in all?",
            "{n} works {a} hours for {b} dollars an hour and gets a tip of {c} dollars. How much is that?",
            "What is {a} times {b} plus {c}?",
            "{n} multiplies {a} by {b} and adds {c}. What is the result?",
        ),
    ),
    Structure(
        "a*b-c",
        _product_less,
        (
            "{n} bought {a} packs of {b} {things} and gave away {c}. How many {things} are left?",
            "A theater has {a} rows of {b} seats, and {c} seats are taken. How many seats are free?",
            "What is {a} times {b} minus {c}?",
            "{n} multiplies {a} by {b} and takes away {c}. What is left?",
        ),
    ),
    Structure(
        "(a+b)/c",
        _shared_sum,
        (
            "{n} has {a} {things} and {m} has {b}. They share among {c} people. How many does each get?",
            "{n} adds {a} and {b} and divides the sum by {c}. What is the result?",
        ),
    ),
    Structure(
        "(a-b)/c",
        _shared_rest,
        (
            "{n} had {a} {things}, kept {b} and split the rest equally among {c} friends. "
            "How many did each friend get?",
            "{n} takes {b} away from {a} and divides the rest by {c}. What is the result?",
        ),
    ),
)
THREE_STEPS = (
    Structure(
        "a*b+c*d",
        _two_products,
        (
            "{n} buys {a} pens for {b} dollars each and {c} bags for {d} dollars each. How much in all?",
            "There are {a} boxes of {b} {things} and {c} bags of {d} {things}. How many {things} are there?",
            "What is {a} times {b} plus {c} times {d}?",
        ),
    ),
    Structure(
        "a*b-c-d",
        _product_two_less,
        (
            "{n} had {a} packs of {b} {things}, sold {c} and lost {d}. How many {things} are left?",
            "What is {a} times {b} minus {c} minus {d}?",
        ),
    ),
    Structure(
        "a+b+c-d",
        _three_less,
        (
            "{n} picked {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday, and gave away {d}. "
            "How many are left?",
            "What is {a} plus {b} plus {c} minus {d}?",
        ),
    ),
    Structure(
        "(a*b+c)/d",
        _shared_product_sum,
        (
            "{n} has {a} boxes of {b} {things} and {c} more. {n} splits them equally among {d} people. "
            "How many does each get?",
            "{n} multiplies {a} by {b}, adds {c} and divides by {d}. What is the result?",
        ),
    ),
)
STEPS = (ONE_STEP, TWO_STEPS, THREE_STEPS)
STEP_WEIGHTS = (5, 3, 2)


class WordProblems(Sequence[Row]):
    """`size` problems, each made when it is asked for: {"question", "answer", "expression", "operations"}."""

    def __init__(self, size: int, seed: int, held_out: bool) -> None:
        self._size = size
        self._seed = seed
        self._held_out = held_out

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"problem {index} of {self._size}")
        return self._problem(index % self._size)

    def _problem(self, index: int) -> Row:
        """Draw until a problem falls on this side of the split: 1 draw or 8 draws on average."""
        side = "held-out" if self._held_out else "train"
        rng = Random(f"{self._seed} {side} {index}")
        row = make_problem(rng)
        while is_held_out(row["question"]) != self._held_out:
            row = make_problem(rng)
        return row


def make_problem(rng: Random) -> Row:
    """One problem, drawn evenly over wordings within each number of steps."""
    structures = rng.choices(STEPS, STEP_WEIGHTS)[0]
    structure = rng.choices(structures, [len(s.texts) for s in structures])[0]
    numbers = structure.draw(rng)
    name, other = rng.sample(NAMES, 2)
    text = rng.choice(structure.texts).format(n=name, m=other, things=rng.choice(THINGS), **numbers)
    expression = re.sub(r"[a-d]", lambda match: str(numbers[match[0]]), structure.expression)
    return {
        "question": text,
        "answer": show(evaluate(expression)),
        "expression": expression,
        "operations": structure.operations,
    }


def is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0
