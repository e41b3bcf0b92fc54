"""Loading: overrides, resolved config, and one sentence for everything that can be wrong."""

import json

import pytest

from configs.keys import all_keys, nearest
from configs.load import DEFAULT_RECIPE, RECIPES, ConfigError, dump_toml, load_config
from configs.schema import RunConfig


def refusal(overrides=(), text=None, tmp_path=None, options=()):
    path = None
    if text is not None:
        path = tmp_path / "my.toml"
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides), options)
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    return message


def test_without_a_path_the_cpu_recipe_is_loaded():
    loaded = load_config(None)
    assert loaded.source == DEFAULT_RECIPE
    assert loaded.config_dir == RECIPES.resolve()
    assert loaded.config.task.name == "calculator"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_without_a_warning(recipe):
    assert load_config(recipe).warnings == ()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_config_that_a_run_folder_keeps_is_the_same_config(recipe, tmp_path):
    config = load_config(recipe).config
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").config == config


def test_overrides_take_the_type_of_their_key():
    config = load_config(
        None,
        [
            *("--learner.lr", "2e-6", "--actors", "3", "--learners=2", "--steps", "7", "--seed", "5"),
            *("--learner.gradient_checkpointing", "--learner.shared_prefix", "false"),
            *("--launch.sinks", '["jsonl", "wandb"]', "--learner.betas", "[0.8, 0.9]"),
            *("--task.options.syntax", "hermes", "--task.options.terms", "3", "--launch.name", "42"),
            *("--ray-address", "10.0.0.1:6379", "--launch.placement", "SPREAD"),
        ],
    ).config
    assert (config.actors.count, config.learner.count, config.learner.steps, config.seed) == (3, 2, 7, 5)
    assert config.learner.lr == 2e-6 and config.learner.betas == (0.8, 0.9)
    assert config.learner.gradient_checkpointing is True and config.learner.shared_prefix is False
    assert config.launch.sinks == ["jsonl", "wandb"] and config.launch.name == "42"
    assert config.task.options == {"syntax": "hermes", "terms": 3}
    assert config.launch.ray_address == "10.0.0.1:6379" and config.launch.placement == "SPREAD"


def test_an_optional_text_can_be_unset_on_the_command_line(tmp_path):
    (tmp_path / "a.toml").write_text('[launch]\nray_address = "auto"\n')
    assert load_config(tmp_path / "a.toml", ["--ray-address", "null"]).config.launch.ray_address is None


def test_the_resolved_config_reads_back_equal(tmp_path):
    config = load_config(None, ["--learner.lr", "3e-7", "--task.options.syntax", "hermes"]).config
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").config == config


def test_a_run_folders_config_keeps_the_folder_of_its_recipe(tmp_path):
    (tmp_path / "config.toml").write_text(dump_toml(RunConfig()))
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "x", "config_dir": "/somewhere/else"}))
    assert str(load_config(tmp_path / "config.toml").config_dir) == "/somewhere/else"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--learner.lrr", "--learner.lr"),
        ("--lr", "--learner.lr"),
        ("--actor.temperature", "--actors.temperature"),
        ("--max_staleness", "--buffer.max_staleness"),
        ("--stepps", "--steps"),
        ("--learner.adv_estimater", "--learner.adv_estimator"),
    ],
)
def test_m10_a_typo_on_the_command_line_is_answered_with_the_nearest_key(typo, meant):
    assert refusal([typo, "1"]) == f"unknown option {typo} on the command line; did you mean {meant}"


def test_m10_a_mistyped_option_of_the_command_is_recognised_too():
    assert refusal(["--conifg", "a.toml"], options=("config", "resume")).endswith("did you mean --config")


def test_m10_a_typo_in_the_file_names_key_file_and_nearest(tmp_path):
    message = refusal(text="[learner]\nlearning_rat = 1\nzero_stag = 1\n", tmp_path=tmp_path)
    assert message.startswith("unknown key learner.learning_rat in my.toml; ")
    message = refusal(text="[learner]\nzero_stag = 1\n", tmp_path=tmp_path)
    assert message == "unknown key learner.zero_stag in my.toml; did you mean learner.zero_stage"
    message = refusal(text="[lerner]\nlr = 1\n", tmp_path=tmp_path)
    assert message == "unknown key lerner in my.toml; did you mean learner"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[learner]\nlr = "fast"\n', 'learner.lr = "fast" in my.toml must be a number above 0'),
        ('[actors]\ncount = "4"\n', 'actors.count = "4" in my.toml must be a whole number above 0'),
        ("[actors]\ncount = true\n", "actors.count = true in my.toml must be a whole number"),
        ("[learner]\nlr = inf\n", "learner.lr = Infinity in my.toml must be a number above 0"),
        ("[learner]\nzero_stage = 4\n", "must be a whole number of at least 0 and of at most 3"),
        ('[learner]\npolicy_loss = "vpg"\n', "must be one of ppo, gspo, cispo"),
        ("[learner]\nbetas = [1, 2, 3]\n", "must be a list of 2, each a number"),
        ('[launch]\nsinks = ["jsonl", "x"]\n', "each one of jsonl, tensorboard, wandb"),
        ("learner = 3\n", "learner in my.toml must be a table, written as [learner]"),
        ("[learner\n", "my.toml is not valid TOML"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_value_and_what_is_wanted(text, says, tmp_path):
    assert says in refusal(text=text, tmp_path=tmp_path)


def test_the_command_line_is_named_when_it_set_the_wrong_value():
    assert "learner.lr = -1 on the command line must be" in refusal(["--learner.lr", "-1"])


def test_a_combination_that_cannot_run_keeps_its_reason():
    assert refusal(["--actors.group_size", "1"]).startswith("actors.group_size = 1 leaves nothing to compare")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--actors"], "--actors needs a value: a whole number above 0"),
        (["--learner.lr", "--seed", "1"], "--learner.lr needs a value"),
        (["train"], "unexpected argument 'train'"),
        (["-x", "1"], "unexpected argument '-x'"),
    ],
)
def test_a_malformed_command_line_says_how_to_write_it(words, says):
    assert says in refusal(words)


def test_a_missing_file_names_the_nearest_recipe(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*did you mean .*calculator_cpu\.toml"):
        load_config(tmp_path / "calculator_cpuu.toml")


def test_settings_of_weightsync_without_effect_warn(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[weightsync]\nbackend = "shm"\nbucket_mb = 8\nprobe_every = 0\nprobe_tolerance = 1'
    )
    assert load_config(tmp_path / "a.toml").warnings == (
        "weightsync.probe_tolerance has no effect with weightsync.probe_every = 0",
        'weightsync.bucket_mb has no effect with weightsync.backend = "shm": a version is one piece there',
    )


def test_settings_without_effect_warn(tmp_path):
    warnings = load_config(None, ["--task.parser", "tag", "--learner.kl_estimator", "k1"]).warnings
    assert warnings == (
        "task.parser has no effect without task.data",
        "learner.kl_estimator has no effect with learner.kl_coef = 0",
    )
    text = '[task]\ndata = "q.jsonl"\noptions = { syntax = "tag" }\n'
    (tmp_path / "a.toml").write_text(text)
    assert load_config(tmp_path / "a.toml").warnings == ("task.options has no effect with task.data",)


def test_settings_of_evaluation_and_judge_without_effect_warn():
    given = ["--eval.every_prompts", "8", "--judge.gpus", "2"]
    assert load_config(None, given).warnings == (
        "judge.gpus has no effect without judge.serve",
        "eval.every_prompts has no effect with eval.every_steps = 0",
    )
    late = load_config(None, ["--eval.every_steps", "60", "--steps", "60"]).warnings
    assert late == ("eval.every_steps has no effect with only learner.steps = 60",)


def test_sampling_seeds_are_different_and_at_least_one():
    assert "eval.seeds = [0, 1, 0] names a seed twice" in refusal(["--eval.seeds", "[0, 1, 0]"])
    assert "eval.seeds" in refusal(["--eval.seeds", "[]"])


def test_every_key_has_a_line_of_documentation_and_says_what_it_takes():
    for key in all_keys().values():
        assert key.doc and key.wanted, key.name


def test_nearest_finds_nothing_where_nothing_is_near():
    assert nearest("xyzzy", all_keys()) is None


SERVER = '[task.mcp.maps]\ncommand = "maps-server"\n'


def test_settings_of_an_mcp_server_can_be_overridden_one_by_one(tmp_path):
    (tmp_path / "a.toml").write_text(SERVER)
    words = ["--task.mcp.maps.timeout_s", "5", "--task.mcp.maps.args", '["-v"]', "--task.mcp.maps.env.CITY=7"]
    server = load_config(tmp_path / "a.toml", words).config.task.mcp["maps"]
    assert (server.timeout_s, server.args, server.env) == (5, ["-v"], {"CITY": "7"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("comand = 'x'", "unknown key task.mcp.maps.comand in my.toml; did you mean task.mcp.maps.command"),
        ("timeout_s = 'x'", 'task.mcp.maps.timeout_s = "x" in my.toml must be a number above 0'),
        ("args = ['a', 3]", 'task.mcp.maps.args = ["a", 3] in my.toml must be a list'),
        ("url = 'http://x/mcp'", "task.mcp.maps needs a command (stdio) or a url (HTTP), but has both"),
        ("headers = {a = 'b'}", "task.mcp.maps.headers has no effect with command"),
        ("env = {API_KEY = 'abc'}", "task.mcp.maps.env.API_KEY would be written to the run folder"),
        ("\n[task.mcp.planes]", "task.mcp.planes needs a command (stdio) or a url (HTTP), but has neither"),
        ("\n[task.mcp.'a.b']\ncommand = 'x'", "task.mcp has a server called 'a.b'"),
        ("\n[task.mcp.web]\nurl = 'localhost:1'", "task.mcp.web.url = 'localhost:1' is no address"),
        ("\n[task.mcp.web]\nurl = 'https://me:pw@host/'", "task.mcp.web.url would be written"),
        (
            "\n[task.mcp.web]\nurl = 'https://host/'\nheaders = {Authorization = 'Bearer abc'}",
            "task.mcp.web.headers.Authorization would be written to the run folder; keep the value in an "
            'environment variable and write "${NAME_OF_THE_VARIABLE}"',
        ),
    ],
)
def test_a_wrong_mcp_server_is_named_with_its_mend(text, says, tmp_path):
    message = refusal(text=f"{SERVER}{text}\n", tmp_path=tmp_path)
    assert says in message and "abc" not in message


def test_a_server_that_is_no_table_is_refused(tmp_path):
    assert "task.mcp.maps in my.toml must be a table" in refusal(
        text='[task.mcp]\nmaps = "maps-server"\n', tmp_path=tmp_path
    )


def test_variables_stay_variables_in_the_resolved_config(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPS_TOKEN", "s3cret")
    text = '[task.mcp.web]\nurl = "https://host/"\nheaders = {Authorization = "Bearer ${MAPS_TOKEN}"}\n'
    (tmp_path / "a.toml").write_text(text)
    resolved = dump_toml(load_config(tmp_path / "a.toml").config)
    assert "Bearer ${MAPS_TOKEN}" in resolved and "s3cret" not in resolved
