"""`sft` and `export-trajectories`: what they set, and a run's best trajectories as demonstrations."""

import json

import pytest

from buffer.messages import PutTrajectory
from configs.load import ConfigError, dump_toml, load_config
from configs.run_folder import RunFolder
from launcher.demonstrations import export_trajectories, sft_overrides
from launcher.preflight import PreflightError
from launcher.prepare import count_demonstrations
from tasks.demonstrations import render
from tasks.readers import PlacedRow
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.buffer.support import Buffer, config, member


@pytest.fixture
def finished(tmp_path):
    """A run folder with a tiny model and three trajectories of two prompts; and these."""
    model = tiny_model(tmp_path / "model")
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text(dump_toml(load_config(None, ["--model.path", str(model)]).config))
    buffer = Buffer(folder.store, config(group_size=2))
    first, second = buffer.lease(most=2)
    put = [member(first, 0, reward=1.0), member(first, 1, reward=1.0), member(second, 0, reward=0.2)]
    for trajectory in put:
        buffer(PutTrajectory(trajectory))
    yield folder, put
    buffer.close()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_best_come_out_as_rows_that_render_to_the_same_tokens(finished, tmp_path):
    folder, put = finished
    out = tmp_path / "demos.jsonl"
    assert export_trajectories(folder, out, min_reward=0.5, per_prompt=None, limit=None) == 2
    for row, trajectory in zip(rows(out), put, strict=False):
        rendered = render(PlacedRow(row, "line"), tiny_tokenizer(), 10_000)
        assert rendered.token_ids == trajectory.token_ids.tolist()
        assert rendered.action_mask == trajectory.action_mask.tolist()


def test_few_of_a_prompt_and_few_in_all(finished, tmp_path):
    folder, _ = finished
    out = tmp_path / "demos.jsonl"
    assert export_trajectories(folder, out, min_reward=0.0, per_prompt=1, limit=None) == 2
    assert len({row["prompt_index"] for row in rows(out)}) == 2
    assert export_trajectories(folder, out, min_reward=0.0, per_prompt=None, limit=1) == 1


def test_nothing_good_enough_is_said(finished, tmp_path):
    with pytest.raises(PreflightError, match="no trajectory with a reward of 2 or more"):
        export_trajectories(finished[0], tmp_path / "demos.jsonl", 2.0, None, None)


def test_sft_makes_a_supervised_run_of_any_recipe(tmp_path):
    demos = tmp_path / "demos.jsonl"
    demos.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 3
    )
    loaded = load_config(None, [*sft_overrides(demos), "--buffer.max_staleness", "2"])
    assert loaded.config.learner.policy_loss == "sft" and loaded.config.actors.group_size == 1
    assert loaded.config.buffer.max_staleness == 2 and loaded.warnings == ()
    assert count_demonstrations(loaded) == 3
    demos.write_text('{"question": "a"}\n')
    with pytest.raises(PreflightError, match=r"demos\.jsonl line 1 is no demonstration"):
        count_demonstrations(loaded)
    with pytest.raises(PreflightError, match=r"sft\.data: there is no file"):
        count_demonstrations(load_config(None, sft_overrides(tmp_path / "missing.jsonl")))


def test_the_loss_and_the_data_of_sft_belong_together():
    with pytest.raises(ConfigError, match="belong together"):
        load_config(None, ["--learner.policy_loss", "sft"])
    with pytest.raises(ConfigError, match="belong together"):
        load_config(None, ["--sft.data", "demos.jsonl"])
