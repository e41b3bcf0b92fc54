"""Rows from a data file or a Python iterable, prompts from rows, and the split into train and held-out.

Invariant: a row that cannot be used is an error that names file and line, before any model starts; the
split goes by a hash of the prompt's text, so equal prompts are never on both sides and (but for a handful
of rows) adding rows moves none. Called by `tasks.loading`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.types import Message, Row
from toolcall.importing import import_object


class BadData(ValueError):
    """Data that cannot be used; the message names the place and the mend."""


@dataclass(frozen=True)
class PlacedRow:
    row: Row
    place: str  # "questions.jsonl line 3"


def read_rows(source: str, folder: Path) -> list[PlacedRow]:
    """Rows of a JSONL, CSV or Parquet file (relative to `folder`), or of a `module:iterable`."""
    path = folder / source
    if ":" in source and not path.exists():
        rows = _rows_of_iterable(source, folder)
    elif not path.is_file():
        raise BadData(f"task.data: there is no file {path}")
    elif reader := _READERS.get(path.suffix.lower()):
        rows = reader(path)
    else:
        raise BadData(f"task.data: {path.name} is not one of {', '.join(_READERS)}; convert it or rename it")
    if not rows:
        raise BadData(f"task.data: {source} has no rows")
    return rows


def split(
    rows: Sequence[PlacedRow], held_out: float, prompt_of: Callable[[Row], str]
) -> tuple[list[Row], list[Row]]:
    """(train, held-out) in file order. Raises BadData if nothing is left to train on."""
    places = [_position(prompt_of(placed.row)) for placed in rows]
    lowest = min(places)  # held out even of a handful of rows, so that there is something to evaluate on
    always = lowest if held_out > 0 and max(places) > lowest else -1.0
    train = [r.row for r, place in zip(rows, places, strict=True) if place >= held_out and place != always]
    held = [r.row for r, place in zip(rows, places, strict=True) if place < held_out or place == always]
    if not train:
        raise BadData(
            f"task.held_out = {held_out} leaves no training row of {len(rows)}; lower it or give more rows"
        )
    return train, held


def _position(text: str) -> float:
    """Where a text falls in [0, 1), the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


class PromptTemplate:
    """`{field}` is replaced by the row's field; `{{field}}` stays as `{field}`; other braces stay."""

    _FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")

    def __init__(self, text: str, system: str = "") -> None:
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
        return [*system, {"role": "user", "content": self.prompt(row)}]

    def _fill(self, text: str, row: Row) -> str:
        return self._FIELD.sub(lambda m: f"{{{m[1]}}}" if m[1] else _shown(row[m[2]]), text)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _rows_of_jsonl(path: Path) -> list[PlacedRow]:
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path.name} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadData(f"{place}: not valid JSON ({error}); each line must be one JSON object") from error
        rows.append(_placed(value, place))
    return rows


def _rows_of_csv(path: Path) -> list[PlacedRow]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            place = f"{path.name} line {reader.line_num}"
            if None in row or None in row.values():
                raise BadData(f"{place}: its number of columns differs from the header's")
            rows.append(_placed(row, place))
    except csv.Error as error:
        raise BadData(f"{path.name} line {reader.line_num}: not valid CSV ({error})") from error
    return rows


def _rows_of_parquet(path: Path) -> list[PlacedRow]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise BadData(f"{path.name}: reading Parquet needs pyarrow; pip install pyarrow") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise BadData(f"{path.name}: not a readable Parquet file ({error})") from error
    return [_placed(row, f"{path.name} row {number}") for number, row in enumerate(rows, 1)]


def _rows_of_iterable(reference: str, folder: Path) -> list[PlacedRow]:
    found = import_object(reference, folder)
    found = found() if callable(found) else found
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | dict):
        raise BadData(f"task.data: {reference} is a {type(found).__name__}, not an iterable of dicts")
    return [_placed(row, f"{reference} item {number}") for number, row in enumerate(found)]


_READERS = {
    ".jsonl": _rows_of_jsonl,
    ".csv": _rows_of_csv,
    ".parquet": _rows_of_parquet,
}


def _read_text(path: Path) -> str:
    """UTF-8 with or without a byte order mark; lone carriage returns and CRLF become line ends."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadData(f"{path.name}: byte {error.start} is not UTF-8; save the file as UTF-8") from error


def _placed(value: Any, place: str) -> PlacedRow:
    if not isinstance(value, dict):
        raise BadData(f"{place}: a row must be an object of named fields, but is a {type(value).__name__}")
    return PlacedRow(value, place)
