"""The mcp_files task: a server and a folder for each trajectory, scored by the final state."""

import asyncio
import json
import random
from pathlib import Path

import psutil
import pytest

from actors.agent_loop import clean_up
from configs.load import load_config
from configs.schema import TaskConfig
from tasks import load_task, score
from tasks.mcp_files import GRADES, final_files, job
from tasks.readers import BadData
from tasks.servers.files import MAX_CHARS, MAX_FILES, Files
from tasks.types import Episode
from toolcall import Executor, Outcome, ToolCall, ToolContext
from toolcall.types import ParsedTurn


@pytest.fixture(scope="module")
def task():
    loaded = load_config(Path("configs/mcp_files_cpu.toml"))
    return load_task(loaded.config.task, loaded.config_dir, seed=0)


def call(name, **arguments):
    return ParsedTurn((ToolCall("1", name, arguments),))


def scored(task, context, *results):
    episode = Episode(context.row, (), ("",) * len(results), results, "answer", context=context)
    return asyncio.get_running_loop().create_task(score(task.rewards, episode)), episode


ROW = {"question": "q", "files": {"a.txt": "one", "b.txt": "two"}, "wanted": {"sub/a.txt": "one"}}


def test_two_trajectories_have_a_server_and_a_folder_each_and_both_end_with_them(task):
    async def scenario():
        before = psutil.Process().children(recursive=True)  # of other tests
        executor = Executor(task.tools)
        mine, other = (ToolContext(trajectory_id=name, row=ROW) for name in "ab")
        results = [
            await executor.run(call("move_file", source="a.txt", target="sub/a.txt"), mine),
            await executor.run(call("delete_file", path="b.txt"), mine),
            await executor.run(call("list_files"), mine),
        ]
        (listed,) = await executor.run(call("list_files"), other)
        assert listed.text == "a.txt\nb.txt" and results[2][0].text == "sub/a.txt"
        scoring, episode = scored(task, mine, *results)
        assert (await scoring).reward == pytest.approx(1.3) and task.success(episode)
        scoring, episode = scored(task, other, (listed,))
        assert (await scoring).reward == pytest.approx(0.1) and not task.success(episode)
        folders = [context.state["folder"] for context in (mine, other)]
        servers = [child for child in psutil.Process().children(recursive=True) if child not in before]
        assert folders[0] != folders[1] and all(folder.is_dir() for folder in folders) and len(servers) >= 2
        for context in (mine, other):
            await clean_up(executor, context)
        assert not any(folder.exists() for folder in folders)
        assert not psutil.wait_procs(servers, timeout=60)[1]

    asyncio.run(scenario())


def test_a_server_that_dies_leaves_the_trajectory_unscored_and_its_folder_goes(task):
    async def scenario():
        executor, context = Executor(task.tools), ToolContext(row=ROW)
        await executor.run(call("list_files"), context)
        folder = context.state["folder"]
        for process in psutil.Process().children(recursive=True):
            process.kill()
        (answer,) = await executor.run(call("delete_file", path="a.txt"), context)
        assert answer.outcome is Outcome.INFRASTRUCTURE
        await clean_up(executor, context)
        assert not folder.exists()

    asyncio.run(scenario())


def test_r4_what_the_model_says_is_no_final_state(task):
    async def scenario():
        context = ToolContext(row=ROW)  # no call: no folder
        scoring, episode = scored(task, context)
        assert (await scoring).reward == 0.0 and not task.success(episode)
        assert final_files(context, ROW["files"]) == ROW["files"]

    asyncio.run(scenario())


def files_changed(task, tmp_path, **found):
    for path, text in found.items():
        (tmp_path / f"{path}.txt").write_text(text)
    reward = next(reward for reward in task.rewards if reward.name == "files_changed")
    row = {"files": {"a.txt": "1", "b.txt": "2", "c.txt": "3"}, "wanted": {"b.txt": "x", "c.txt": "3"}}
    return reward(ToolContext(state={"folder": tmp_path}), row["files"], row["wanted"])


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ({"b": "x", "c": "3"}, 1.0),
        ({"b": "x\n", "c": "3", "a": "1"}, 0.5),
        ({"b": "x"}, 0.0),  # another file was deleted
        ({"b": "x", "c": "3", "d": ""}, 0.0),  # another was made
        ({"a": "1", "b": "2", "c": "3"}, 0.0),
    ],
)
def test_part_of_the_job_earns_a_part_unless_something_else_was_touched(task, tmp_path, found, value):
    assert files_changed(task, tmp_path, **found) == value


def test_jobs_can_be_done_differ_and_are_held_out(task):
    for grade in range(1, GRADES + 1):
        for seed in range(50):
            made = job(random.Random(seed), grade)
            assert made["files"] != made["wanted"] and made["grade"] == grade
    jobs = [(row["question"], str(row["files"])) for row in task.held_out]
    assert not set(jobs) & {(row["question"], str(row["files"])) for row in task.train}
    assert load_task(TaskConfig(name="mcp_files"), Path(), seed=5).held_out[:5] != task.train[:5]


# --- the server's own rules, without a process -----------------------------------------------------------


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ".", "", "link/x", "a\0b", "x" * 5000])
def test_no_path_leads_out_of_the_folder(tmp_path, path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    files = Files(folder)
    for attempt in (files.read_file, files.delete_file, lambda p: files.write_file(p, "x")):
        with pytest.raises(Exception, match=r"path|folder|no file") as raised:
            attempt(path)
        assert type(raised.value).__name__ == "ToolError"
    assert [each.name for each in tmp_path.iterdir()] == ["own"]


def test_a_file_has_its_limits_and_a_refusal_says_what_there_is(tmp_path):
    files = Files(tmp_path)
    assert files.list_files() == "no files" and files.write_file("a.txt", "é\r\n") == "wrote a.txt"
    assert (tmp_path / "a.txt").read_bytes() == "é\r\n".encode() and files.read_file("a.txt") == "é\r\n"
    for refused, says in (
        (lambda: files.write_file("b", "x" * (MAX_CHARS + 1)), "20001 characters"),
        (lambda: files.write_file("a.txt/b", ""), "a file is in the way"),
        (lambda: files.read_file("b.txt"), "no file 'b.txt'; the files are: a.txt"),
        (lambda: files.move_file("a.txt", "a.txt"), "a.txt exists already"),
    ):
        with pytest.raises(Exception, match=says):
            refused()
    for number in range(MAX_FILES - 1):
        files.write_file(f"d/{number}", "")
    with pytest.raises(Exception, match="100 files already"):
        files.write_file("one more", "")
    with pytest.raises(Exception, match="'d' is a folder"):
        files.write_file("d", "x")


# --- rows and settings that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "rows.jsonl line 1: no 'files' of paths and texts; the row has: question, files"),
        ({"../x": ""}, "line 1: files: '../x' is no path below the folder"),
        ({"a": 3}, "line 1: files: 'a' must be text, not int"),
        ({"a": "", "a/b": ""}, "line 1: files: 'a/b' lies in what is itself a file"),
    ],
)
def test_a_row_whose_files_cannot_be_written_is_an_error_with_its_line(tmp_path, files, says):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "files": files}) + "\n" * 2)
    server = {"command": "python", "args": ["{folder}"], "scope": "trajectory", "files": "files"}
    settings = {"data": "rows.jsonl", "rewards": ["tasks.rules:exact_match"], "mcp": {"own": server}}
    rewards = [{"use": "tasks.rules:exact_match", "options": {"answer": "a"}}]
    with pytest.raises(BadData, match=says):
        load_task(TaskConfig.model_validate(settings | {"rewards": rewards}), tmp_path, seed=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"files": "files", "scope": "trajectory"}, r"files has no effect: tell the server its \{folder\}"),
        ({"args": ["{folder}"]}, r"\{folder\} is of one trajectory; set task.mcp.own.scope"),
        ({"env": {"AT": "{folder}/x"}}, r"\{folder\} is of one trajectory"),
    ],
)
def test_a_folder_needs_a_server_for_each_trajectory(changes, says):
    with pytest.raises(ValueError, match=says):
        TaskConfig.model_validate({"mcp": {"own": {"command": "python", **changes}}})
