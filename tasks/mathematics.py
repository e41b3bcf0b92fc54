"""Mathematical equivalence by the math-verify library: `tasks.mathematics:math_match`.

Invariant: a hostile answer (9**9**9**9) costs a worker process its life, never the actor's event loop: the
library runs in processes of its own, under a deadline. Needs `math-verify` and `pebble`.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import multiprocessing
from functools import lru_cache
from typing import Any

from tasks.reward import reward
from tasks.rules import extract_answer
from tasks.scoring import Unscorable
from tasks.types import Episode

EQUIVALENCE_S = 20.0
_WORKERS = 2


@reward
def math_match(episode: Episode, answer: Any, tag: str = "answer") -> float:
    """1 if the model's `<answer>` (or its `\\boxed{…}`, with `tag = ""`) equals the row's answer, else 0.

    Numbers, fractions, sets, intervals, equations and formulas, in LaTeX or plain notation.
    """
    given = extract_answer(episode, tag)
    return 0.0 if given is None else float(same_value(given, str(answer)))


def same_value(given: str, expected: str) -> bool:
    """Raises Unscorable if `expected` itself is no mathematics, or if the two take too long to compare."""
    try:
        equal = _pool().schedule(_equal, (given, expected), timeout=EQUIVALENCE_S).result()
    except TimeoutError:
        raise Unscorable(f"{given[:40]!r} was not compared within {EQUIVALENCE_S:g} s") from None
    if equal is None:
        raise Unscorable(f"the row's answer {expected!r} cannot be read as mathematics")
    return equal


def _equal(given: str, expected: str) -> bool | None:
    """In a worker. None if `expected` cannot be read. The library's own deadlines need a main thread."""
    from math_verify import parse, verify

    wanted = parse(_delimited(expected), parsing_timeout=0)
    if not wanted:
        return None
    return verify(wanted, parse(_delimited(given), parsing_timeout=0), timeout_seconds=0)


def _prepare_worker() -> None:
    """Before its first task, so that importing the library counts against no answer."""
    importlib.import_module("math_verify")
    logging.disable(logging.WARNING)  # it warns of the deadlines that are switched off here


def _delimited(text: str) -> str:
    """Without delimiters the library takes the last number it finds: "3 or 4" would equal 4. An amount's
    `\\$` is none."""
    text = text.replace("\\$", "")
    return text if "$" in text or "\\boxed" in text else f"${text}$"


@lru_cache(maxsize=1)
def _pool() -> Any:
    for library in ("math_verify", "pebble"):
        if importlib.util.find_spec(library) is None:
            raise Unscorable(f"tasks.mathematics needs {library}; pip install math-verify pebble")
    from pebble import ProcessPool

    context = multiprocessing.get_context("spawn")  # the actor has threads: a fork could inherit a held lock
    pool = ProcessPool(_WORKERS, initializer=_prepare_worker, context=context)
    atexit.register(pool.stop)
    return pool
