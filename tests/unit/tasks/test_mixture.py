"""Several tasks in one run: shares by weight, every row visited, mistakes said."""

import json
from collections import Counter

import pytest

from configs.load import load_config
from configs.schema import TaskConfig
from tasks.loading import BadTask
from tasks.mixture import load_mixture


@pytest.fixture
def folder(tmp_path):
    """Recipes a (30 rows) and b (10 rows) of 512 and 700 tokens, and one that is itself a mixture."""
    for name, count, tokens in (("a", 30, 512), ("b", 10, 700)):
        rows = [{"question": f"{name} {n}?", "answer": str(n)} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{name}.toml").write_text(
            f'[task]\ndata = "{name}.jsonl"\nrewards = ["tasks.rules:exact_match"]\nheld_out = 0\n'
            f"max_trajectory_tokens = {tokens}\n"
        )
    (tmp_path / "nested.toml").write_text('[task]\nmix = [{ config = "a.toml" }]\n')
    return tmp_path


def mixed(folder, *mix, dropped=(), **fields):
    return load_mixture(TaskConfig(mix=list(mix), **fields), folder, 0, dropped)


def test_one_task_is_a_mixture_of_itself(folder):
    config = load_config(folder / "a.toml")
    mixture = load_mixture(config.config.task, folder, 0)
    rows = mixture.parts[0].task.train
    assert len(mixture) == 30
    assert all(mixture.pick(i, epoch) == (0, rows[i]) for i in range(30) for epoch in (0, 3))
    with pytest.raises(IndexError):
        mixture.pick(30, 0)


def test_an_epoch_has_each_tasks_share_and_the_epochs_visit_every_row_equally(folder):
    mixture = mixed(folder, {"config": "a.toml"}, {"config": "b.toml", "weight": 3})
    assert [part.share for part in mixture.parts] == [10, 30] and len(mixture) == 40
    seen = [mixture.pick(index, epoch) for epoch in range(3) for index in range(40)]
    assert Counter(number for number, _ in seen) == {0: 30, 1: 90}
    assert set(Counter(row["question"] for number, row in seen if number == 0).values()) == {1}
    assert set(Counter(row["question"] for number, row in seen if number == 1).values()) == {9}


def test_rows_left_out_of_a_task_are_never_picked(folder):
    mixture = mixed(folder, {"config": "a.toml"}, {"config": "b.toml"}, dropped=[[0, 1], []])
    assert [len(part.task.train) for part in mixture.parts] == [28, 10] and len(mixture) == 38
    picked = {mixture.pick(i, epoch)[1]["question"] for i in range(38) for epoch in range(4)}
    assert len(picked) == 38 and not {"a 0?", "a 1?"} & picked


@pytest.mark.parametrize(
    ("mix", "fields", "says"),
    [
        ([{"config": "a.toml"}, {"config": "a.toml"}], {}, "two tasks called 'a'"),
        ([{"config": "a.toml", "wieght": 1}], {}, "'wieght' in .* not one of config, weight"),
        ([{"weight": 1}], {}, "names no recipe"),
        ([{"config": "a.toml", "weight": 0}], {}, "weight = 0 of a.toml"),
        ([{"config": "nested.toml"}], {}, "nested.toml is itself a mixture"),
        ([{"config": "b.toml"}], {"max_trajectory_tokens": 600}, "600 is less than the 700 of b.toml"),
    ],
)
def test_mistakes_in_a_mixture_are_said(folder, mix, fields, says):
    with pytest.raises(BadTask, match=says):
        mixed(folder, *mix, **fields)


def test_settings_that_a_mixture_does_not_use_warn(folder):
    (folder / "m.toml").write_text('[task]\nmix = [{ config = "a.toml" }]\nmax_turns = 9\n')
    (warning,) = load_config(folder / "m.toml").warnings
    assert warning.startswith("task.max_turns has no effect with task.mix")
