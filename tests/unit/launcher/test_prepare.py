"""From a config to a run folder and to what each role is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import load_config
from configs.run_folder import RunFolder
from launcher import prepare
from launcher.preflight import PreflightError
from launcher.prepare import (
    check_rewards,
    existing_folder,
    measure_prompts,
    new_folder,
    prepare_run,
    prepare_tools,
    read_tasks,
)
from launcher.train import notes
from tasks.mixture import load_mixture


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """The CPU recipe on a machine whose model is prepared already."""
    monkeypatch.setattr(prepare, "prepare_model", lambda name: tmp_path / "model")
    monkeypatch.setattr(prepare, "find_gpus", lambda: 0)
    return load_config(
        None, ["--actors", "2", "--learners", "2", "--launch.runs_dir", str(tmp_path / "runs")]
    )


def test_a_new_folder_is_named_by_task_and_time_or_as_asked(loaded, tmp_path):
    folder = new_folder(loaded.config, now=0.0)
    assert folder.root.parent == tmp_path / "runs" and folder.root.name.startswith("calculator-")
    named = load_config(None, ["--name", "mine", "--task.data", "a/questions.jsonl"]).config
    assert new_folder(named).root == Path("runs/mine")
    by_data = load_config(None, ["--task.data", "a/questions.jsonl"]).config
    assert new_folder(by_data).root.name.startswith("questions-")


def test_a_folder_with_a_run_in_it_is_refused_with_both_mends(tmp_path):
    config = load_config(None, ["--name", "x", "--launch.runs_dir", str(tmp_path)]).config
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.toml").touch()
    with pytest.raises(PreflightError, match=r"a run in .*x already; .*--resume .*x, or give another --name"):
        new_folder(config)


def test_only_a_run_folder_can_be_resumed(tmp_path):
    with pytest.raises(PreflightError, match="is no run folder"):
        existing_folder(tmp_path)


def test_maxrl_refuses_a_penalty_before_anything_starts(tmp_path):
    mixture = load_mixture(load_config(None, []).config.task, tmp_path, seed=0)
    (part,) = mixture.parts
    penalty = replace(part.task.rewards[0], weight=-0.5)
    harsh = replace(part, task=replace(part.task, rewards=(penalty,)))
    config = load_config(None, ["--learner.adv_estimator", "maxrl"]).config
    check_rewards(config, mixture)
    with pytest.raises(PreflightError, match=r"'correct' of calculator has weight -0\.5; give it 0 or more"):
        check_rewards(config, replace(mixture, parts=(harsh,)))


def test_the_folder_says_what_the_run_is_and_a_resumed_run_keeps_its_id(loaded, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "x")
    run = prepare_run(loaded, folder)
    assert load_config(folder.config).config == loaded.config
    assert load_config(folder.config).config_dir == loaded.config_dir
    assert folder.endpoint.read_text().strip() == run.endpoint
    assert json.loads(folder.run_info.read_text())["run_id"] == run.run_id
    again = prepare_run(load_config(folder.config, ["--steps", "500"]), existing_folder(folder.root))
    assert again.run_id == run.run_id and again.keys == run.keys
    assert load_config(folder.config).config.learner.steps == 500


def test_each_role_is_told_who_it_is(loaded, tmp_path):
    specs = prepare_run(loaded, RunFolder(tmp_path / "runs" / "x")).specs()
    assert [spec.name for spec in specs] == ["buffer", "actor-0", "actor-1", "learner-0", "learner-1"]
    assert [(spec.rank, spec.world) for spec in specs] == [(0, 1), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert len({spec.buffer_endpoint for spec in specs}) == 1
    assert all(spec.num_prompts > 0 and spec.run_dir.is_absolute() for spec in specs)


def test_a_task_that_cannot_be_loaded_is_one_sentence(tmp_path):
    (tmp_path / "a.toml").write_text('[task]\nname = "calculater"\n')
    with pytest.raises(PreflightError, match=r"the task cannot be loaded: .*calculater"):
        read_tasks(load_config(tmp_path / "a.toml"))
    (tmp_path / "a.toml").write_text('[task]\ndata = "none.jsonl"\nrewards = ["tasks.rules:exact_match"]\n')
    with pytest.raises(PreflightError, match=r"the task cannot be loaded: .*none\.jsonl"):
        read_tasks(load_config(tmp_path / "a.toml"))


def test_nothing_is_written_when_a_check_fails(monkeypatch, loaded, tmp_path):
    def refuse(name):
        raise PreflightError("model folder has no chat template")

    monkeypatch.setattr(prepare, "prepare_model", refuse)
    with pytest.raises(PreflightError):
        prepare_run(loaded, RunFolder(tmp_path / "runs" / "x"))
    assert not (tmp_path / "runs").exists()


# --- the data ----------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data task of 19 rows or so; what the measuring process would find is `found`."""
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(20)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c.toml").write_text('[task]\ndata = "q.jsonl"\nrewards = ["tasks.rules:exact_match"]\n')
    found: list[int] = []
    answer = {"too_long": [found], "syntaxes": ["call syntax tag: chosen by the task"]}
    monkeypatch.setattr(prepare, "run_module", lambda *_: json.dumps(answer))
    monkeypatch.setattr(prepare, "prepare_model", lambda name: tmp_path / "model")
    monkeypatch.setattr(prepare, "find_gpus", lambda: 0)
    return tmp_path, found


def test_prompts_without_room_are_left_out_and_counted(data):
    folder, found = data
    before = len(read_tasks(load_config(folder / "c.toml")))
    found += [0, 3]
    run = prepare_run(load_config(folder / "c.toml"), RunFolder(folder / "run"))
    assert run.syntaxes == ("call syntax tag: chosen by the task",)
    specs = run.specs()
    assert all(spec.dropped_prompts == ((0, 3),) for spec in specs)
    assert all(spec.num_prompts == len(run.mixture) == before - 2 for spec in specs)
    assert "2 training prompts of q left out" in notes(run)


@pytest.mark.parametrize(
    ("policy", "count", "says"),
    [
        ("refuse", 1, '1 of .* leave no room to answer .* begins \'What is .*long_prompts = "drop"'),
        ("drop", 20, "leave no room to answer within task.max_trajectory_tokens = 1024; raise it"),
    ],
)
def test_prompts_without_room_are_refused(data, policy, count, says):
    folder, found = data
    loaded = load_config(folder / "c.toml", ["--task.long_prompts", policy])
    mixture = read_tasks(loaded)
    found += range(min(count, len(mixture)))
    with pytest.raises(PreflightError, match=says):
        measure_prompts(loaded, mixture, folder)


def test_data_smaller_than_a_step_is_said(data):
    folder, _ = data
    for groups, said in ((8, False), (20, True)):
        loaded = load_config(folder / "c.toml", ["--buffer.groups_per_batch", str(groups)])
        run = prepare_run(loaded, RunFolder(folder / f"run{groups}"))
        assert ("a step repeats some" in notes(run)) is said


def test_tools_say_what_they_found_before_a_run_and_one_that_lacks_something_stops_it(tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 2)
    (tmp_path / "corpus.jsonl").write_text('{"text": "cats"}\n')
    config = tmp_path / "x.toml"
    config.write_text(
        '[task]\ndata = "questions.jsonl"\nrewards = ["tasks.rules:exact_match"]\nheld_out = 0.0\n'
        'tools = [{ use = "toolcall.tools.search:bm25_tool", options = { corpus = "corpus.jsonl" } }]\n'
    )
    (said,) = prepare_tools(read_tasks(load_config(config)))
    assert said == f"tool search: 1 passages of {tmp_path / 'corpus.jsonl'}"
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(PreflightError, match=r"tool 'search' cannot be used: search: the corpus .* is empty"):
        prepare_tools(read_tasks(load_config(config)))


def test_evaluations_during_training_need_held_out_rows(data):
    folder, _ = data
    recipe = folder / "c.toml"
    run = prepare_run(load_config(recipe, ["--eval.every_steps", "5"]), RunFolder(folder / "run"))
    held_out = len(run.mixture.parts[0].task.held_out)
    assert {spec.num_held_out for spec in run.specs()} == {held_out} and held_out > 0
    assert run.specs()[0].shares == run.mixture.shares
    loaded = load_config(recipe, ["--eval.every_steps", "5", "--task.held_out", "0"])
    with pytest.raises(PreflightError, match="has no held-out rows"):
        prepare_run(loaded, RunFolder(folder / "other"))
