"""What the shipped tasks share: worked examples as prior turns, checks of their options, what is held out.

Used by the modules that `tasks.loading.SHIPPED` names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tasks.data import position
from tasks.types import Message, Row


def worked_example(
    question: str, tool: str, arguments: Mapping[str, Any], result: str, answer: str
) -> list[Message]:
    """`one_call` that ends with `<answer>`."""
    return one_call(question, tool, arguments, result, f"<answer>{answer}</answer>")


def one_call(
    question: str, tool: str, arguments: Mapping[str, Any], result: str, reply: str
) -> list[Message]:
    """Question, one call, its result, the reply; the renderer writes the call in the model's syntax."""
    function = {"name": tool, "arguments": arguments}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": tool, "content": result},
        {"role": "assistant", "content": reply},
    ]


def prompt_maker(system: str, examples: Iterable[list[Message]]) -> Callable[[Row], list[Message]]:
    """A row's prompt: the system message, worked examples, the row's `question`."""
    opening: list[Message] = [{"role": "system", "content": system}]
    for example in examples:
        opening += example
    return lambda row: [*opening, {"role": "user", "content": row["question"]}]


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError naming `task.options.<option>`."""
    if value not in choices:
        raise ValueError(f"task.options.{option} = {value!r}; choose one of: {', '.join(choices)}")


def check_range(option: str, value: int, least: int, most: int | None = None) -> None:
    """Raises ValueError naming `task.options.<option>`."""
    if value < least or (most is not None and value > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"task.options.{option} = {value} must be {wanted}")


def is_held_out(subject: str, share: float = 0.2) -> bool:
    """Whether what is asked about it is for evaluation: by hash, the same everywhere."""
    return position(subject) < share


def drawn_rows(
    count: int, seed: int, make: Callable[[random.Random, int], Row], *, held_out: bool
) -> list[Row]:
    """Rows `make(rng, number)` whose `question` falls on that side, so that no question is on both."""
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        made = make(rng, len(rows))
        if is_held_out(made["question"]) is held_out:
            rows.append(made)
    return rows
