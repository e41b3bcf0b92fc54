"""The shipped task `sql`: questions answered by querying a SQLite database, scored by execution.

    <sql>SELECT capital FROM country WHERE name = 'Kenya'</sql>
    <result>Nairobi</result>
    <answer>SELECT capital FROM country WHERE name = 'Kenya'</answer>

The database is made from the World Factbook (see `tasks.factbook`). A query counts by what it returns, not by
how it is written; it can read the table and nothing else. Held-out questions are about places that no
training question names. Called by `tasks.loading`.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tasks.conduct import well_formed_calls
from tasks.factbook import countries
from tasks.reward import reward
from tasks.rules import extract_answer
from tasks.scoring import Unscorable
from tasks.shipped import check_choice, check_range, is_held_out, prompt_maker, worked_example
from tasks.types import Episode, Message, Reward, Row, Task
from toolcall import ToolError, tool
from toolcall.parsers import make_parser

SCHEMA = "country(name, region, capital, currency, area_km2, coastline_km)"
SYSTEM = {
    "tag": f"Table: {SCHEMA}. Try queries in <sql></sql>, then give the right one in <answer></answer>.",
    "auto": f"Table: {SCHEMA}. Try queries with the sql tool, then give the right one in <answer></answer>.",
}
MAX_ROWS = 10  # shown to the model
MAX_STEPS = 2_000_000  # of SQLite's machine, so that a hostile query ends
MAX_FETCHED = 1000  # rows
MAX_VALUE_BYTES = 10_000


class BadQuery(ValueError):
    """SQLite refused the query or it ran too long; the message is for the model."""


def run_query(query: str) -> list[tuple[Any, ...]]:
    """The rows of one SELECT on the country table. Raises BadQuery."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(_database())
        connection.set_authorizer(_may)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        steps = iter(range(MAX_STEPS // 1000))
        connection.set_progress_handler(lambda: next(steps, None) is None, 1000)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise BadQuery("this is no query; write a SELECT")
        return cursor.fetchmany(MAX_FETCHED)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise BadQuery("the query ran too long" if str(error) == "interrupted" else str(error)) from error
    finally:
        connection.close()


_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def _may(action: int, *_: str | None) -> int:
    """Reading only: no write, and no ATTACH, VACUUM or PRAGMA, which reach files."""
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


@lru_cache(maxsize=1)
def _database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE {SCHEMA}")
    connection.executemany(
        "INSERT INTO country VALUES (?, ?, ?, ?, ?, ?)",
        [(c.name, c.region, c.capital, c.currency, c.area_km2, c.coastline_km) for c in countries()],
    )
    connection.commit()
    return connection.serialize()


@tool(timeout=10, max_concurrency=8, idempotent=True)
def sql(query: str) -> str:
    """Run one SQLite query on the country table and show its first rows.

    Args:
        query: A SELECT statement.
    """
    try:
        rows = run_query(query)
    except BadQuery as error:
        raise ToolError(str(error)) from error
    shown = "\n".join(" | ".join(map(str, row)) for row in rows[:MAX_ROWS])
    more = f"\n… {len(rows) - MAX_ROWS} more rows" if len(rows) > MAX_ROWS else ""
    return shown + more if rows else "no rows"


@reward
def execution_match(episode: Episode, query: str, ordered: bool = False, tag: str = "answer") -> float:
    """1 if the model's `<answer>` returns the rows that the row's `query` returns, else 0.

    In any order, unless the row says `ordered`. Whole numbers and their floats are equal.
    """
    try:
        wanted = run_query(query)
    except BadQuery as error:
        raise Unscorable(f"the row's own query fails: {error}") from error
    given = extract_answer(episode, tag)
    if given is None:
        return 0.0
    try:
        found = run_query(given)
    except BadQuery:
        return 0.0
    ours, theirs = [repr(_plain(row)) for row in found], [repr(_plain(row)) for row in wanted]
    return float(ours == theirs if ordered else sorted(ours) == sorted(theirs))


def _plain(row: tuple[Any, ...]) -> list[Any]:
    return [float(value) if isinstance(value, int) else value for value in row]


@dataclass(frozen=True)
class _Form:
    """A kind of question: its words and its query, with the fields of a country in braces."""

    question: str
    query: str
    ordered: bool = False


_FORMS = (
    _Form("What is the capital of {name}?", "SELECT capital FROM country WHERE name = '{sql}'"),
    _Form("Which currency does {name} use?", "SELECT currency FROM country WHERE name = '{sql}'"),
    _Form("How large is {name}, in square kilometres?", "SELECT area_km2 FROM country WHERE name = '{sql}'"),
    _Form(
        "How many countries are larger than {name}?",
        "SELECT COUNT(*) FROM country WHERE area_km2 > (SELECT area_km2 FROM country WHERE name = '{sql}')",
    ),
    _Form(
        "Which countries are in the region of {name} and have a longer coastline than it?",
        "SELECT name FROM country WHERE region = (SELECT region FROM country WHERE name = '{sql}') AND "
        "coastline_km > (SELECT coastline_km FROM country WHERE name = '{sql}')",
    ),
    _Form(
        "Name the three largest countries that use the currency of {name}, the largest first.",
        "SELECT name FROM country WHERE currency = (SELECT currency FROM country WHERE name = '{sql}') "
        "ORDER BY area_km2 DESC LIMIT 3",
        ordered=True,
    ),
)
_SHOWN = ("Kenya", "Nepal")


def sql_task(
    seed: int, syntax: Literal["tag", "auto"] = "tag", shots: int = 2, forms: int = len(_FORMS)
) -> Task:
    """Questions of six kinds, from a look-up to a subquery with an order.

    Success: the query in `<answer>` returns the right rows. Rewards: `execution_match` 1,
    `well_formed_calls` 0.1.
    """
    check_choice("syntax", syntax, SYSTEM)
    check_range("shots", shots, 0, len(_SHOWN))
    check_range("forms", forms, 1, len(_FORMS))
    train, held_out = _questions(seed, _FORMS[:forms])
    return Task(
        name="sql",
        train=train,
        held_out=held_out,
        make_messages=prompt_maker(SYSTEM[syntax], _examples()[:shots]),
        tools=(sql,),
        parser=make_parser("tag", tags={"sql": ("sql", "query")}) if syntax == "tag" else None,
        rewards=(
            Reward("execution_match", execution_match.fn, 1.0),
            Reward("well_formed_calls", well_formed_calls.fn, 0.1),
        ),
        success=lambda episode: episode.scores.get("execution_match", 0.0) == 1.0,
        tools_in_prompt=syntax == "tag",
    )


def _questions(seed: int, forms: Sequence[_Form]) -> tuple[list[Row], list[Row]]:
    """(train, held-out): every kind of question for every country but those of the worked examples."""
    train, held_out = [], []
    for country in countries():
        if country.name not in _SHOWN:
            side = held_out if is_held_out(country.name) else train
            rows = [_row(form, country.name) for form in forms]
            side += [row for row in rows if run_query(row["query"])]  # nothing is no answer to learn from
    random.Random(seed).shuffle(train)
    random.Random(0).shuffle(held_out)
    return train, held_out


def _row(form: _Form, name: str) -> Row:
    quoted = name.replace("'", "''")
    return {
        "question": form.question.format(name=name),
        "query": form.query.format(sql=quoted),
        "ordered": form.ordered,
    }


def _examples() -> list[list[Message]]:
    rows = [_row(form, name) for form, name in zip((_FORMS[3], _FORMS[0]), _SHOWN, strict=True)]
    return [
        worked_example(row["question"], "sql", {"query": row["query"]}, sql.fn(row["query"]), row["query"])
        for row in rows
    ]
