"""Presets by paper name: they fill in, they never overrule, and the documentation lists what they set."""

import json
import re
from pathlib import Path

import pytest

from configs.load import dump_toml, load_config
from configs.presets import PRESETS

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_keys_and_nothing_warns(name):
    loaded = load_config(None, ["--learner.preset", name])
    for key, value in PRESETS[name].items():
        assert getattr(loaded.config.learner, key) == value
    assert loaded.warnings == ()


def test_a_key_that_is_set_wins_over_the_preset():
    learner = load_config(
        None, ["--learner.preset", "dapo", "--learner.clip_ratio_high", "0.5"]
    ).config.learner
    assert learner.clip_ratio_high == 0.5 and learner.clip_ratio_low == 0.2


def test_a_resolved_config_reads_back_equal(tmp_path):
    config = load_config(None, ["--learner.preset", "scalerl", "--learner.clip_ratio_high", "3.0"]).config
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").config == config


def test_the_documentation_lists_every_preset_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \| \[\d{4}\.\d{5}\]", DOCUMENTATION.read_text(), re.M)
    listed = {
        name: {key: json.loads(value) for key, value in re.findall(r"`(\w+) = ([^`]+)`", settings)}
        for name, settings in rows
    }
    assert listed == PRESETS
