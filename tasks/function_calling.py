"""The shipped task `function_calling`: real function schemas, others in each row, scored by the call itself.

Rows in the form of the Berkeley Function Calling Leaderboard: `question`, `function` (schemas) and
`ground_truth`, `[{"f": {"argument": [admissible values]}}]`, where "" says that it may be absent. By default
those that the package `bfcl-eval` ships; `file` and `answers` read others.

Invariant: a call counts by what the function would have received, not by how it was written; and the
functions that a row's answer calls are among those it offers. Called by `tasks.loading`.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.call_equality import BadAnswer, calls_match, valid, wanted_calls
from tasks.data import split
from tasks.readers import BadData, PlacedRow, read_rows
from tasks.reward import reward
from tasks.row_tools import RowTools
from tasks.scoring import Unscorable
from tasks.shipped import check_range, one_call
from tasks.types import Episode, Message, Reward, Row, Task
from toolcall.types import ParseFailure, ToolCall

PACKAGE = "bfcl_eval"
CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
SYSTEM = "Call the tools that answer the question."
_SHOTS = (
    ("What time is it in Lima?", "get_time", {"city": "Lima"}),
    ("Convert 20 euros to US dollars.", "convert_currency", {"amount": 20, "from": "EUR", "to": "USD"}),
)


@reward
def call_match(episode: Episode, ground_truth: list[dict[str, Any]] | str) -> float:
    """1 if the calls of the trajectory are exactly those of `ground_truth`, in any order, else 0.

    An empty `ground_truth` asks for no call. A call that cannot be read, or that its schema refuses, is
    wrong.
    """
    try:
        wanted = wanted_calls(ground_truth)
    except BadAnswer as error:
        raise Unscorable(f"ground_truth: {error}") from error
    made = _made(episode)
    calls = [call for call in made if isinstance(call, ToolCall)]
    offered = episode.context.offered or {}
    return float(len(calls) == len(made) and calls_match(calls, wanted, offered))


@reward(weight=0.1)
def valid_calls(episode: Episode) -> float:
    """Share of calls that could be read and that an offered function would accept; 0 without a call."""
    made, offered = _made(episode), episode.context.offered or {}
    accepted = sum(isinstance(call, ToolCall) and valid(call, offered) for call in made)
    return accepted / len(made) if made else 0.0


def _made(episode: Episode) -> list[ToolCall | ParseFailure]:
    return [call for turn in episode.parsed for call in turn.calls]


class BfclMissing(ValueError):
    """The package is not installed."""


def function_calling_task(
    seed: int,
    folder: Path,
    categories: Sequence[str] = ("simple",),
    shots: int = len(_SHOTS),
    held_out: float = 0.3,
    file: str = "",
    answers: str = "",
) -> Task:
    """One turn: the model is offered the row's functions and calls them.

    Success and main reward: `call_match`. `valid_calls` 0.1 for calls that a function would accept.
    """
    check_range("shots", shots, 0, len(_SHOTS))
    rows = _rows_of_file(file, answers, folder) if file else _rows_of_package(categories)
    offered = RowTools("function", ())
    offered.check(rows)
    _check_answers(rows, offered)
    train, held = split(rows, held_out, lambda row: json.dumps(row["question"]))
    random.Random(seed).shuffle(train)
    opening = [m for shot in _SHOTS[:shots] for m in one_call(*shot, result="ok", reply="Done.")]
    return Task(
        name="function_calling",
        train=train,
        held_out=held,
        make_messages=lambda row: _messages(row, opening),
        tools=(),
        parser=None,
        rewards=(Reward("call_match", call_match.fn, 1.0), Reward("valid_calls", valid_calls.fn, 0.1)),
        success=lambda episode: episode.scores.get("call_match", 0.0) == 1.0,
        offered=offered,
    )


def _messages(row: Row, opening: Sequence[Message]) -> list[Message]:
    question = list(row["question"])
    system = question.pop(0)["content"] if question[0]["role"] == "system" else SYSTEM
    return [{"role": "system", "content": system}, *opening, *question]


def _rows_of_package(categories: Sequence[str]) -> list[PlacedRow]:
    for category in categories:
        if category not in CATEGORIES:
            raise ValueError(f"task.options.categories has {category!r}; choose of: {', '.join(CATEGORIES)}")
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise BfclMissing("the function_calling task needs bfcl-eval; pip install --no-deps bfcl-eval")
    data = Path(found.submodule_search_locations[0]) / "data"
    rows = []
    for category in categories:
        name = f"BFCL_v4_{'simple_python' if category == 'simple' else category}.json"
        if category == "irrelevance":
            rows += _with_truth(read_rows(name, data), lambda row: [])
        else:
            rows += _rows_of_file(name, f"possible_answer/{name}", data)
    return rows


def _rows_of_file(file: str, answers: str, folder: Path) -> list[PlacedRow]:
    """answers: a file with the `ground_truth` of each `id`; without it the rows have their own."""
    if not answers:
        return _with_truth(read_rows(file, folder), lambda row: row.get("ground_truth"))
    truths = {placed.row.get("id"): placed.row.get("ground_truth") for placed in read_rows(answers, folder)}
    return _with_truth(read_rows(file, folder), lambda row: truths.get(row.get("id")))


def _with_truth(rows: Iterable[PlacedRow], truth_of: Callable[[Row], Any]) -> list[PlacedRow]:
    complete = []
    for placed in rows:
        truth = truth_of(placed.row)
        if truth is None:
            raise BadData(
                f"{placed.place}: no ground_truth (id {placed.row.get('id')!r}); [] says that none is right"
            )
        row = {**placed.row, "question": _question(placed), "ground_truth": truth}
        complete.append(PlacedRow(row, placed.place))
    return complete


def _question(placed: PlacedRow) -> list[Message]:
    """A text, messages, or the leaderboard's list of one list of messages."""
    question = placed.row.get("question")
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    if isinstance(question, list) and question and isinstance(question[0], list):
        if len(question) > 1:
            raise BadData(f"{placed.place}: question has {len(question)} user turns; this task takes one")
        question = question[0]
    if not isinstance(question, list) or not question or not all(map(_is_message, question)):
        raise BadData(f"{placed.place}: question must be a text, or messages with role and content")
    return question


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _check_answers(rows: Iterable[PlacedRow], offered: RowTools) -> None:
    for placed in rows:
        names = [tool.name for tool in offered(placed.row)]
        try:
            wanted = wanted_calls(placed.row["ground_truth"])
        except BadAnswer as error:
            raise BadData(f"{placed.place}: ground_truth: {error}") from error
        if lost := next((call.name for call in wanted if call.name not in names), None):
            raise BadData(
                f"{placed.place}: ground_truth calls {lost!r}, which function lacks: {', '.join(names)}"
            )
