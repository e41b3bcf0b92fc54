"""Seeded problems for the `code` task: a wording, a reference solution, inputs.

Invariant: the same seed gives the same problems; every problem's tests hold for its reference solution.
Called by `tasks.code`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.types import Row

GRADES = 3
SHOWN, HIDDEN = 2, 6
_WORDS = ("amber", "birch", "cloud", "delta", "ember", "frost", "grove", "heron", "inlet", "jolly", "kite")


@dataclass(frozen=True)
class _Kind:
    """`text` and `solve` share the parameter k; `draw` makes one input."""

    text: str
    solve: Callable[[int, Any], Any]
    draw: Callable[[random.Random], Any]
    ks: range


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(0, 9))]


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS)[: rng.randint(1, 6)] for _ in range(rng.randint(0, 7)))


def _intervals(rng: random.Random) -> list[list[int]]:
    starts = [rng.randint(0, 40) for _ in range(rng.randint(0, 6))]
    return [[start, start + rng.randint(0, 6)] for start in starts]


def _shift(k: int, s: str) -> str:
    return "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in s)


def _kth(k: int, xs: list[int]) -> int | None:
    distinct = sorted(set(xs), reverse=True)
    return distinct[k - 1] if k <= len(distinct) else None


def _window(k: int, xs: list[int]) -> int | None:
    sums = [sum(xs[i : i + k]) for i in range(len(xs) - k + 1)]
    return max(sums) if sums else None


def _steady(k: int, xs: list[int]) -> int:
    best = run = 0
    for i, x in enumerate(xs):
        run = run + 1 if i and abs(x - xs[i - 1]) <= k else 1
        best = max(best, run)
    return best


def _merge(k: int, spans: list[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= k:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


_KINDS: dict[int, tuple[_Kind, ...]] = {
    1: (
        _Kind(
            "returns the sum of the numbers in the list x that are divisible by {k}",
            lambda k, xs: sum(n for n in xs if n % k == 0),
            _numbers,
            range(2, 10),
        ),
        _Kind(
            "returns how many words of the string x have at least {k} letters",
            lambda k, s: sum(len(word) >= k for word in s.split()),
            _sentence,
            range(2, 6),
        ),
        _Kind(
            "returns the list of the numbers in x that are greater than {k}, in their order",
            lambda k, xs: [n for n in xs if n > k],
            _numbers,
            range(0, 20),
        ),
    ),
    2: (
        _Kind(
            "returns the number of the list x that is number {k} from the largest, equals counted once, "
            "or None if there are fewer",
            _kth,
            _numbers,
            range(2, 6),
        ),
        _Kind(
            "returns the string x with every small letter moved {k} places on in the alphabet, z being "
            "followed by a",
            _shift,
            _sentence,
            range(1, 25),
        ),
    ),
    3: (
        _Kind(
            "returns the largest sum of {k} neighbouring numbers of the list x, or None if x is shorter",
            _window,
            _numbers,
            range(2, 5),
        ),
        _Kind(
            "returns the length of the longest run in the list x in which neighbours differ by at most {k}",
            _steady,
            _numbers,
            range(1, 15),
        ),
        _Kind(
            "merges the intervals [start, end] of the list x that overlap or lie at most {k} apart, "
            "and returns them in order",
            _merge,
            _intervals,
            range(0, 4),
        ),
    ),
}


def problem(rng: random.Random, grade: int) -> Row:
    """One problem: `question`, `examples` to show, `tests` to hide, `grade`."""
    kind = rng.choice(_KINDS[grade])
    k = rng.choice(kind.ks)
    tests: list[str] = []
    while len(tests) < SHOWN + HIDDEN:
        given = kind.draw(rng)
        test = f"assert solve({given!r}) == {kind.solve(k, given)!r}"
        if test not in tests:
            tests.append(test)
    return {
        "question": f"Write a Python function solve(x) that {kind.text.format(k=k)}.",
        "examples": tests[:SHOWN],
        "tests": tests[SHOWN:],
        "grade": grade,
    }
