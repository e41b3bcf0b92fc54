"""Prompts from rows, and the split into train and held-out.

Invariant: the split goes by a hash of the prompt's text, so equal prompts are never on both sides and (but
for a handful of rows) adding rows moves none. Called by `tasks.loading`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tasks.readers import BadData, PlacedRow
from tasks.types import Message, Row


def split(
    rows: Sequence[PlacedRow], held_out: float, prompt_of: Callable[[Row], str]
) -> tuple[list[Row], list[Row]]:
    """(train, held-out) in file order. Raises BadData if nothing is left to train on."""
    places = [position(prompt_of(placed.row)) for placed in rows]
    lowest = min(places)  # held out even of a handful of rows, so that there is something to evaluate on
    always = lowest if held_out > 0 and max(places) > lowest else -1.0
    train = [r.row for r, place in zip(rows, places, strict=True) if place >= held_out and place != always]
    held = [r.row for r, place in zip(rows, places, strict=True) if place < held_out or place == always]
    if not train:
        raise BadData(
            f"task.held_out = {held_out} leaves no training row of {len(rows)}; lower it or give more rows"
        )
    return train, held


def position(text: str) -> float:
    """Where a text falls in [0, 1), the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


_ROLES = ("user", "assistant", "tool")


class PromptTemplate:
    """`{field}` is replaced by the row's field; `{{field}}` stays as `{field}`; other braces stay."""

    _FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")

    def __init__(self, text: str, system: str = "", examples: Sequence[Message] = ()) -> None:
        """examples: worked turns before the prompt, shown as they are."""
        for number, message in enumerate(examples, 1):
            if set(message) != {"role", "content"} or message["role"] not in _ROLES:
                raise BadData(
                    f"task.examples: message {number} is {message}; each has a role ({', '.join(_ROLES)}) "
                    "and a content"
                )
        self._examples = list(examples)
        self._text = text
        self._system = system
        self.fields = tuple(dict.fromkeys(m[2] for m in self._FIELD.finditer(text + system) if m[2]))

    def check(self, rows: Iterable[PlacedRow]) -> None:
        """Raise BadData, naming the place, if a row lacks a field that the prompt names."""
        for placed in rows:
            for field in self.fields:
                if placed.row.get(field) is None:
                    has = ", ".join(placed.row) or "nothing"
                    raise BadData(
                        f"{placed.place}: no {field!r}, which the prompt names as {{{field}}}; the row has: "
                        f"{has} (write {{{{{field}}}}} to keep the braces)"
                    )

    def prompt(self, row: Row) -> str:
        return self._fill(self._text, row)

    def messages(self, row: Row) -> list[Message]:
        system = [{"role": "system", "content": self._fill(self._system, row)}] if self._system else []
        return [*system, *self._examples, {"role": "user", "content": self.prompt(row)}]

    def _fill(self, text: str, row: Row) -> str:
        return self._FIELD.sub(lambda m: f"{{{m[1]}}}" if m[1] else _shown(row[m[2]]), text)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
