"""From a `[task]` section to a task, and what is wrong with one that leads to none."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TaskConfig
from tasks import Task, load_task, score
from tasks.data import PromptTemplate, split
from tasks.loading import BadTask
from tasks.readers import BadData, PlacedRow, read_rows
from tasks.reward import BadReward
from tests.unit.tasks.support import episode
from toolcall import BadTool
from toolcall.importing import BadReference

MODULE = '''
from dataclasses import replace

from tasks import load_task, reward
from tasks.calculator import calculator_task
from toolcall import tool

ROWS = [{"question": f"q{n}", "answer": str(n)} for n in range(30)]


def rows():
    yield from ROWS


@tool(timeout=10)
async def search(query: str, top_k: int = 3) -> str:
    """Search the catalogue."""
    return query


@tool
async def move(x: int, y: int) -> str:
    """Move."""
    return f"{x} {y}"


@reward(weight=2.0)
async def says_it(trajectory, answer: str) -> float:
    return float(answer in trajectory.text)


@reward
def misspelt(trajectory, anwser: str) -> float:
    return 0.0


@reward
def counts(trajectory, answer: list[str]) -> float:
    return 0.0


def plain(trajectory) -> float:
    return 0.0


def my_task(seed, size=3):
    return replace(calculator_task(seed, train_size=size), name="mine")


def no_task():
    return 3


def no_rewards():
    return replace(calculator_task(0), rewards=())


def twice():
    task = calculator_task(0)
    return replace(task, rewards=(*task.rewards, task.rewards[0]))
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task_of_mine.py").write_text(MODULE)
    rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(200)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield tmp_path
    sys.modules.pop("task_of_mine", None)


def data_config(**changes) -> TaskConfig:
    fields = {
        "data": "questions.jsonl",
        "tools": ["task_of_mine:search"],
        "rewards": ["task_of_mine:says_it"],
        "system": "Use search.",
        "prompt": "{question} Write {{question}} or {}.",
    }
    return TaskConfig(**(fields | changes))


def rows_of(folder, name, content, **options) -> list[PlacedRow]:
    path = folder / name
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content, **options)
    return read_rows(name, folder)


# --- data tasks -----------------------------------------------------------------------------------------


def test_a_data_task_has_prompts_tools_and_rewards(folder):
    task = load_task(data_config(), folder, seed=0)
    assert task.name == "questions" and [tool.name for tool in task.tools] == ["search"]
    assert task.make_messages({"question": "Who {is} it?"}) == [
        {"role": "system", "content": "Use search."},
        {"role": "user", "content": "Who {is} it? Write {question} or {}."},
    ]
    assert len(task.train) + len(task.held_out) == 200 and 5 < len(task.held_out) < 40
    assert not task.tools_in_prompt and task.parser is None  # the chat template decides


@pytest.mark.parametrize(
    ("rule", "answer", "says"),
    [
        ("exact_match", '""', "answer = '' is refused: it is empty"),
        ("exact_match", "[]", r"answer = \[\] is refused: it is empty"),
        ("f1", '["a", " "]', "is refused: it is empty"),
        ("exact_match", "NaN", "asks for 'answer', which is null"),
        ("exact_match", "null", "asks for 'answer', which is null"),
        ("numeric_match", '"$5"', r"answer = '\$5' is refused: it is no number"),
        ("numeric_match", "[5]", "is refused: it is no number"),
    ],
)
def test_an_answer_that_nobody_or_nothing_could_give_is_refused_with_its_line(folder, rule, answer, says):
    rows = f'{{"question": "a", "answer": 5}}\n{{"question": "b", "answer": {answer}}}'
    (folder / "bad.jsonl").write_text(rows)
    config = data_config(data="bad.jsonl", rewards=[f"tasks.rules:{rule}"])
    with pytest.raises(BadReward, match=f"bad.jsonl line 2: .*{says}"):
        load_task(config, folder, seed=0)


@pytest.mark.parametrize(("option", "value"), [("shots", "many"), ("train_size", [1]), ("shots", 2.5)])
def test_an_option_of_another_type_is_refused_by_its_name(folder, option, value):
    with pytest.raises(BadTask, match=f"task.options.{option} = .* is refused: Input should be a valid int"):
        load_task(TaskConfig(name="calculator", options={option: value}), folder, seed=0)


def test_success_of_a_data_task_is_its_first_reward_at_1(folder):
    task = load_task(data_config(), folder, seed=0)
    for text, succeeded in (("It is 84", True), ("It is 7", False)):
        made = episode(text)
        assert asyncio.run(score(task.rewards, made)).reward == 2.0 * succeeded
        assert task.success(made) is succeeded


def test_one_reward_may_serve_twice_with_other_settings(folder):
    rewards = ["task_of_mine:says_it", {"use": "task_of_mine:says_it", "name": "again", "weight": -0.5}]
    task = load_task(data_config(rewards=rewards), folder, seed=0)
    assert asyncio.run(score(task.rewards, episode("It is 84"))).components == {"says_it": 1, "again": 1}
    assert [r.weight for r in task.rewards] == [2.0, -0.5]


def test_the_split_does_not_depend_on_seed_order_or_other_rows(folder):
    first = load_task(data_config(), folder, seed=0)
    lines = (folder / "questions.jsonl").read_text().splitlines()
    (folder / "questions.jsonl").write_text("\n".join(reversed(lines[:150])))
    second = load_task(data_config(), folder, seed=7)
    held = {row["question"] for row in first.held_out}
    assert {row["question"] for row in second.held_out} <= held
    assert not held & {row["question"] for row in second.train}


@given(st.lists(st.integers(0, 20), min_size=2, max_size=60), st.floats(0, 1))
def test_equal_prompts_are_never_on_both_sides(values, fraction):
    placed = [PlacedRow({"q": value, "id": number}, "") for number, value in enumerate(values)]
    try:
        train, held = split(placed, fraction, lambda row: str(row["q"]))
    except BadData:
        return
    assert len(train) + len(held) == len(values) and train
    assert not {row["q"] for row in train} & {row["q"] for row in held}
    if fraction > 0 and len(set(values)) > 1:
        assert held
    if fraction == 0:
        assert not held


def test_tags_are_the_tools_names_and_their_one_argument(folder):
    task = load_task(data_config(parser="tag"), folder, seed=0)
    (call,) = task.parser.parse("<search>cats</search>").calls
    assert (call.name, call.arguments) == ("search", {"query": "cats"})
    assert not task.tools_in_prompt  # so the renderer offers the tag
    assert load_task(data_config(parser="tag", system="Use <search>."), folder, seed=0).tools_in_prompt
    with pytest.raises(BadTask, match="'move' needs 2: x, y"):
        load_task(data_config(parser="tag", tools=["task_of_mine:move"]), folder, seed=0)


@pytest.mark.parametrize(
    ("changes", "call", "arguments"),
    [
        (
            {"parser": "tag", "parser_options": {"tags": {"find": ["search", "query"]}}},
            "<find>cats</find>",
            {"query": "cats"},
        ),
        ({"parser": "fenced_python"}, "<code>\n```python\ncats\n```\n</code>", {"query": "cats"}),
        ({"parser": "llama3_json"}, '{"name": "search"}', {}),
    ],
)
def test_a_parser_takes_its_options(folder, changes, call, arguments):
    task = load_task(data_config(**changes), folder, seed=0)
    (found,) = task.parser.parse(call).calls
    assert (found.name, found.arguments) == ("search", arguments)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parser": "hermez"}, "no parser 'hermez'; choose one of: auto, hermes, .*, fenced_python"),
        ({"parser": "hermes", "parser_options": {"x": 1}}, "parser 'hermes' has no option 'x'"),
        ({"parser_options": {"x": 1}}, "belong to one parser"),
        ({"parser": "tag", "parser_options": {"tags": {"find": "search"}}}, "a tool and its argument"),
        ({"parser": "tag", "parser_options": {"tags": {"find": ["look", "q"]}}}, "call 'look'.*: search"),
        ({"parser": "tag", "parser_options": {"tags": {"find": ["search", "q"]}}}, "fill 'q' .*: query"),
        ({"parser": "tag", "tools": ["task_of_mine:move"]}, 'use parser = "auto"'),
        ({"parser": "fenced_python", "tools": []}, "by one tool, but there are 0"),
        (
            {
                "parser": "tag",
                "tools": ["task_of_mine:search", "task_of_mine:move"],
                "parser_options": {"tags": {"find": ["search", "query"]}},
            },
            "no way to call tool 'move'",
        ),
    ],
)
def test_a_parser_that_does_not_fit_the_tools_is_refused(folder, changes, says):
    with pytest.raises(ValueError, match=says):
        load_task(data_config(**changes), folder, seed=0)


def test_rows_may_come_from_a_python_iterable(folder):
    for reference in ("task_of_mine:ROWS", "task_of_mine:rows"):
        task = load_task(data_config(data=reference), folder, seed=0)
        assert len(task.train) + len(task.held_out) == 30


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"data": "nowhere.jsonl"}, BadData, "no file .*nowhere.jsonl"),
        ({"data": "task_of_mine.py"}, BadData, "not one of .jsonl, .json, .csv, .parquet"),
        ({"data": "task_of_mine:MISSING"}, BadReference, "has no 'MISSING'"),
        ({"prompt": "{qestion}"}, BadData, "questions.jsonl line 1: no 'qestion'.*has: question, answer"),
        ({"system": "{role}"}, BadData, "line 1: no 'role'"),
        ({"rewards": []}, BadTask, "task.rewards is empty"),
        ({"examples": [{"role": "user"}]}, BadData, "task.examples: message 1 is {'role': 'user'}"),
        ({"examples": [{"role": "system", "content": "x"}]}, BadData, "each has a role .user, assistant"),
        ({"rewards": ["task_of_mine:misspelt"]}, BadReward, "line 1: .*'anwser'.*answer, question"),
        ({"rewards": ["task_of_mine:plain"]}, BadReward, "decorate it with @reward"),
        (
            {"rewards": [{"use": "task_of_mine:says_it", "wieght": 2}]},
            BadReward,
            "'wieght' in .* not one of use",
        ),
        (
            {"rewards": ["task_of_mine:counts"]},
            BadReward,
            "line 1: .*'0' is refused: .* a valid list",
        ),
        ({"rewards": [{"weight": 2}]}, BadReward, "names no reward"),
        (
            {"rewards": [{"use": "task_of_mine:says_it", "fields": {"answer": "gold"}}]},
            BadReward,
            "line 1: .*'gold', which the row does not have",
        ),
        (
            {"rewards": [{"use": "tasks.rules:regex_match", "options": {"pattern": "("}}]},
            BadReward,
            "options.pattern = '\\(' is refused",
        ),
        (
            {"rewards": [{"use": "tasks.rules:json_schema", "options": {"schema": {"type": "strnig"}}}]},
            BadReward,
            "not a JSON schema: 'strnig'",
        ),
        ({"rewards": ["task_of_mine:says_it"] * 2}, BadTask, "two rewards called 'says_it'"),
        ({"tools": ["task_of_mine:plain"]}, BadTool, "decorate it with @tool"),
        ({"parser": "xml"}, ValueError, "no parser 'xml'"),
        ({"held_out": 1.0}, BadData, "leaves no training row"),
    ],
)
def test_what_is_wrong_with_a_data_task_is_said(folder, changes, error, says):
    with pytest.raises(error, match=says):
        load_task(data_config(**changes), folder, seed=0)


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_byte_order_mark_line_ends_and_empty_lines_are_tolerated(tmp_path, newline):
    lines = ['{"q": "a\u2028b"}', "", "   ", '{"q": "é"}', ""]
    rows = rows_of(tmp_path, "d.jsonl", b"\xef\xbb\xbf" + newline.join(lines).encode())
    assert [r.row["q"] for r in rows] == ["a\u2028b", "é"]
    assert [r.place for r in rows] == ["d.jsonl line 1", "d.jsonl line 4"]
    content = b"\xef\xbb\xbf" + newline.join(["q,a", '"x, y",1', "", "z,2"]).encode()
    assert [r.row for r in rows_of(tmp_path, "d.csv", content)] == [
        {"q": "x, y", "a": "1"},
        {"q": "z", "a": "2"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.jsonl", '{"q": 1}\n{"q": \n', "d.jsonl line 2: not valid JSON"),
        ("d.jsonl", '{"q": 1}\n[1]\n', "d.jsonl line 2: a row must be an object .* a list"),
        ("d.jsonl", "\n\n", "has no rows"),
        ("d.jsonl", b'{"q": "\xff"}', "byte 7 is not UTF-8"),
        ("d.csv", "q,a\n1,2\n1,2,3\n", "d.csv line 3: its number of columns"),
        ("d.csv", "q,a\n1\n", "d.csv line 2: its number of columns"),
        ("d.csv", 'q\n"open', "not valid CSV"),
        ("d.csv", "q,a,q\n1,2,3\n", "d.csv line 1: two columns are called 'q'"),
        ("d.csv", "q,a\n", "has no rows"),
        ("d.csv", "q,a\n,\n", "has no rows"),
        (
            "d.jsonl",
            '{"id": 7}\n{"id": "7"}\n\n{"id": 7}',
            "line 4: id 7 is also that of d.jsonl line 1",
        ),
        ("d.json", '{"q": 1}\n7', "d.json line 2: a row must be an object .* a int"),
        ("d.json", '[{"q": 1}, 2]', "d.json item 2: a row must be an object .* a int"),
        ("d.json", "[1", "d.json: not valid JSON"),
        ("d.parquet", b"PAR1", "not a readable Parquet file"),
        ("d.arrow", b"ARROW1", "not a readable Arrow file"),
    ],
)
def test_broken_files_are_errors_that_name_the_place(tmp_path, name, content, says):
    with pytest.raises(BadData, match=says):
        rows_of(tmp_path, name, content)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(BadData, match="pip install pyarrow"):
        rows_of(tmp_path, "d.parquet", b"PAR1")


def test_parquet_and_arrow_files_have_the_rows_of_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"q": "é", "a": ["x", "y"], "n": 1}, {"q": "b", "a": [], "n": None}]
    table = pyarrow.Table.from_pylist(rows)
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "d.parquet")
    for name, opener in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with (tmp_path / name).open("wb") as file, opener(file, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    for name in ("d.parquet", "stream.arrow", "file.arrow", "d.json"):
        assert [placed.row for placed in read_rows(name, tmp_path)] == rows


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (["train.jsonl", "test.jsonl"], "train", {"train.jsonl"}),
        (["train.jsonl", "test.jsonl"], "test", {"test.jsonl"}),
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"], "train", {"0", "1"}),
        (["train/data-00000-of-00001.jsonl", "test/data-00000-of-00001.jsonl"], "train", {"train"}),
        (["part-a.jsonl", "part-b.jsonl", "dataset_info.json"], "train", {"a", "b"}),
    ],
)
def test_a_folder_is_read_by_split(tmp_path, files, split, found):
    for name in files:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"file": name}))
    rows = read_rows("set", tmp_path, split)
    assert len(rows) == len(found) and {placed.row["file"] for placed in rows} <= set(files)
    assert all(split in placed.row["file"] or "part" in placed.row["file"] for placed in rows)


def test_a_folder_without_the_split_says_what_it_has(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"q": 1}')
    with pytest.raises(BadData, match=r"no split 'train' \(task.data_split\); it has: test.jsonl"):
        read_rows("set", tmp_path)


def test_the_hub_is_read_by_its_library_and_its_errors_are_one_sentence(tmp_path, monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, configuration, split):
            if name == "nobody/nothing":
                raise FileNotFoundError("no such dataset")
            return [{"question": f"{name} {configuration} {split}"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    (placed,) = read_rows("hf:openai/gsm8k:main", tmp_path, "test")
    assert placed.row == {"question": "openai/gsm8k main test"}
    with pytest.raises(BadData, match="split 'train' cannot be loaded: no such dataset"):
        read_rows("hf:nobody/nothing", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadData, match="pip install datasets"):
        read_rows("hf:openai/gsm8k", tmp_path)


def test_a_csv_files_text_is_read_by_the_rewards_hints(folder):
    rows = "question,answer\nOne plus one?,2\nTwo plus two?,4\n"
    (folder / "sums.csv").write_text(rows)
    (folder / "csv_task.py").write_text(
        "from tasks import reward\n\n@reward\ndef near(answer: float) -> float:\n    return answer + 0.5\n"
    )
    task = load_task(data_config(data="sums.csv", rewards=["csv_task:near"]), folder, seed=0)
    assert asyncio.run(score(task.rewards, episode("2", answer="2"))).reward == 2.5


def test_null_is_no_answer_but_the_default_where_there_is_one(folder):
    """As a Parquet file has it for every field that a row lacks; "None" must not be the right answer."""
    (folder / "null_task.py").write_text(
        "from tasks import reward\n\n"
        "@reward\ndef ready(trajectory, limit: int = 3) -> float:\n    return limit\n\n"
        "@reward\ndef told(hint: str | None) -> float:\n    return float(hint is None)\n"
    )
    (folder / "null.jsonl").write_text('{"question": "q", "answer": null, "limit": null, "hint": null}')
    for name, value in (("null_task:ready", 3.0), ("null_task:told", 1.0)):
        task = load_task(data_config(data="null.jsonl", rewards=[name], held_out=0), folder, seed=0)
        made = episode("None", **task.train[0])
        assert asyncio.run(score(task.rewards, made)).reward == value
    for name in ("tasks.rules:exact_match", "task_of_mine:says_it"):
        with pytest.raises(BadReward, match=r"null.jsonl line 1: .* asks for 'answer', which is null"):
            load_task(data_config(data="null.jsonl", rewards=[name]), folder, seed=0)


def test_a_template_fills_fields_once_and_keeps_other_braces():
    template = PromptTemplate('{a} {b} {"x": 1} {} {{a}} {1}')
    assert template.fields == ("a", "b")
    assert template.prompt({"a": "{b}", "b": [1, "é"]}) == '{b} [1, "é"] {"x": 1} {} {a} {1}'


# --- shipped and users' own tasks ---------------------------------------------------------------------------


def test_a_users_function_makes_a_task(folder):
    config = TaskConfig(name="task_of_mine:my_task", options={"size": 5})
    task = load_task(config, folder, seed=3)
    assert isinstance(task, Task) and (task.name, len(task.train)) == ("mine", 5)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"name": "calculater"}, BadTask, "did you mean 'calculator'.*Use one of: calculator, "),
        ({"name": "chess"}, BadTask, "Use one of: calculator"),
        ({"options": {"sintax": "tag"}}, BadTask, "no 'sintax' .*syntax, shots, train_size"),
        ({"options": {"syntax": "xml"}}, ValueError, "tag, hermes"),
        ({"options": {"shots": 99}}, ValueError, "shots = 99"),
        ({"options": {"train_size": 0}}, ValueError, "train_size = 0"),
        ({"name": "task_of_mine:no_task"}, BadTask, "returned a int, not a tasks.Task"),
        ({"name": "task_of_mine:ROWS"}, BadTask, "not a function"),
        ({"name": "task_of_mine:no_rewards"}, BadTask, "has no rewards"),
        ({"name": "task_of_mine:twice"}, BadTask, "two rewards called 'correct'"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(folder, fields, error, says):
    with pytest.raises(error, match=says):
        load_task(TaskConfig(**fields), folder, seed=0)


def test_tool_options_change_the_tools_of_any_task():
    options = {"calculator": {"timeout": 1.5}}
    (changed,) = load_task(TaskConfig(tool_options=options), Path("."), seed=0).tools
    assert changed.options.timeout == 1.5
    with pytest.raises(BadTool, match="no tool 'calculater'; did you mean 'calculator'"):
        load_task(TaskConfig(tool_options={"calculater": {}}), Path("."), seed=0)
