"""Rows from files, a Python iterable or the Hugging Face hub, each with the place it came from.

Invariant: a row that cannot be used is an error that names file and line, before any model starts.
Called by `tasks.loading`.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.types import Row
from toolcall.importing import import_object

_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
_NOT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside Arrow files of `datasets`


class BadData(ValueError):
    """Data that cannot be used; the message names the place and the mend."""


@dataclass(frozen=True)
class PlacedRow:
    row: Row
    place: str  # "questions.jsonl line 3"


def read_rows(source: str, folder: Path, data_split: str = "train") -> list[PlacedRow]:
    """Rows of `task.data`: a JSONL, JSON, CSV, Parquet or Arrow file or a folder of them (relative to
    `folder`), a `module:iterable`, or `hf:name` of the Hugging Face hub. Raises BadData.
    """
    path = folder / source
    if source.startswith("hf:"):
        rows = _rows_of_hub(source, data_split)
    elif ":" in source and not path.exists():
        rows = _rows_of_iterable(source, folder)
    elif path.is_dir():
        rows = [row for file in _files_of_split(path, data_split) for row in _rows_of_file(file)]
    elif path.is_file():
        rows = _rows_of_file(path)
    else:
        raise BadData(f"task.data: there is no file {path}")
    if not rows:
        raise BadData(f"task.data: {source} has no rows")
    _refuse_same_ids(rows)
    return rows


def _rows_of_file(path: Path) -> list[PlacedRow]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadData(f"task.data: {path.name} is not one of {', '.join(_READERS)}; convert it or rename it")
    return reader(path)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a folder as the Hugging Face hub lays it out: `train.jsonl`,
    `data/train-00000-of-00002.parquet`, `train/data-00000-of-00001.arrow`. Without any split: all."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _READERS)
    files = [path for path in files if path.name not in _NOT_DATA]
    by_split = {path: _split_of(path.relative_to(folder)) for path in files}
    chosen = [path for path in files if by_split[path] == split]
    if not chosen and not any(by_split.values()):
        chosen = files
    if not chosen:
        there = ", ".join(str(path.relative_to(folder)) for path in files[:5]) or "no data file"
        raise BadData(f"task.data: {folder} has no split {split!r} (task.data_split); it has: {there}")
    return chosen


def _split_of(path: Path) -> str | None:
    for part in (*path.parts[:-1], path.stem):
        word = re.split(r"[-_.0-9]", part)[0]
        if word in _SPLITS:
            return word
    return None


def _refuse_same_ids(rows: Sequence[PlacedRow]) -> None:
    """Rows may have an `id`; two with the same are a mistake that would train one prompt twice."""
    first: dict[str, str] = {}
    for placed in rows:
        name = placed.row.get("id")
        if name is None:
            continue
        if (key := repr(name)) in first:
            raise BadData(
                f"{placed.place}: id {name!r} is also that of {first[key]}; remove one, or rename the field "
                "if it is no identifier"
            )
        first[key] = placed.place


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
        _refuse_same_columns(path, reader.fieldnames or ())
        for row in reader:
            place = f"{path.name} line {reader.line_num}"
            if not any((row or {}).values()):
                continue  # only separators: an empty row of a spreadsheet
            if None in row or None in row.values():
                raise BadData(f"{place}: its number of columns differs from the header's")
            rows.append(_placed(row, place))
    except csv.Error as error:
        raise BadData(f"{path.name} line {reader.line_num}: not valid CSV ({error})") from error
    return rows


def _refuse_same_columns(path: Path, names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadData(f"{path.name} line 1: two columns are called {twice!r}; rename one")


def _rows_of_json(path: Path) -> list[PlacedRow]:
    text = _read_text(path)
    if not text.lstrip().startswith("["):  # many a .json file holds JSON lines
        return _rows_of_jsonl(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path.name}: not valid JSON ({error})") from error
    return [_placed(row, f"{path.name} item {number}") for number, row in enumerate(value, 1)]


def _rows_of_parquet(path: Path) -> list[PlacedRow]:
    return _rows_of_table(path, "Parquet", lambda: _pyarrow("parquet", path).read_table(path))


def _rows_of_arrow(path: Path) -> list[PlacedRow]:
    """As `datasets` saves: an IPC stream, or else an IPC file."""

    def read() -> Any:
        ipc = _pyarrow("ipc", path)
        opener = ipc.open_file if path.read_bytes()[:6] == b"ARROW1" else ipc.open_stream
        with path.open("rb") as file:
            return opener(file).read_all()

    return _rows_of_table(path, "Arrow", read)


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ModuleNotFoundError as error:
        raise BadData(f"{path.name}: reading {path.suffix} needs pyarrow; pip install pyarrow") from error


def _rows_of_table(path: Path, kind: str, read: Callable[[], Any]) -> list[PlacedRow]:
    try:
        rows = read().to_pylist()
    except BadData:
        raise
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise BadData(f"{path.name}: not a readable {kind} file ({error})") from error
    return [_placed(row, f"{path.name} row {number}") for number, row in enumerate(rows, 1)]


def _rows_of_hub(source: str, split: str) -> list[PlacedRow]:
    """`hf:openai/gsm8k` or, with a configuration, `hf:openai/gsm8k:main`."""
    name, _, configuration = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise BadData(f"task.data: {source} needs the datasets library; pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # of many kinds: network, name, split, configuration
        raise BadData(f"task.data: {source}, split {split!r} cannot be loaded: {error}") from error
    return [_placed(dict(row), f"{source} row {number}") for number, row in enumerate(rows)]


def _rows_of_iterable(reference: str, folder: Path) -> list[PlacedRow]:
    found = import_object(reference, folder)
    found = found() if callable(found) else found
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | dict):
        raise BadData(f"task.data: {reference} is a {type(found).__name__}, not an iterable of dicts")
    return [_placed(row, f"{reference} item {number}") for number, row in enumerate(found)]


_READERS = {
    ".jsonl": _rows_of_jsonl,
    ".json": _rows_of_json,
    ".csv": _rows_of_csv,
    ".parquet": _rows_of_parquet,
    ".arrow": _rows_of_arrow,
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
