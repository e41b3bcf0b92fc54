"""The command line: what reaches the commands, and how mistakes are answered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import launch
from configs.load import ConfigError
from launcher import commands
from launcher.preflight import PreflightError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def calls(monkeypatch):
    """The commands' arguments in place of the commands."""
    seen = []
    for name in ("train", "sft", "export_trajectories", "check", "keys", "evaluate", "status", "tools"):
        monkeypatch.setattr(commands, name, lambda *args, name=name: seen.append((name, *args)) or 0)
    return seen


def run(*words):
    return CliRunner().invoke(launch.app, list(words))


def test_without_a_command_it_trains(calls):
    assert run().exit_code == 0
    assert run("--config", "a.toml", "--actors", "4", "--learner.lr", "2e-6", "--seed=-1").exit_code == 0
    assert run("train", "--resume", "runs/x").exit_code == 0
    assert calls == [
        ("train", None, None, []),
        ("train", Path("a.toml"), None, ["--actors", "4", "--learner.lr", "2e-6", "--seed=-1"]),
        ("train", None, Path("runs/x"), []),
    ]


def test_overrides_keep_their_order_around_options(calls):
    run("check", "--learner.lr", "-1", "--config", "a.toml", "--task.options.syntax", "hermes")
    assert calls == [("check", Path("a.toml"), ["--learner.lr", "-1", "--task.options.syntax", "hermes"])]


def test_eval_and_status_and_keys(calls):
    run("eval", "--model", "runs/x/export", "--eval.prompts", "512")
    run("status", "--run", "runs/x")
    run("check", "--keys", "staleness")
    assert calls == [
        ("evaluate", None, "runs/x/export", None, None, ["--eval.prompts", "512"]),
        ("status", Path("runs/x")),
        ("keys", "staleness"),
    ]


def test_a_call_of_a_tool_and_settings_may_stand_around_the_config(calls):
    run("tools", "call", "search", '{"query": "a b"}', "--config", "a.toml", "--task.options.shots", "2")
    assert calls == [
        ("tools", Path("a.toml"), ["call", "search", '{"query": "a b"}', "--task.options.shots", "2"])
    ]


def test_sft_and_export_trajectories(calls):
    run("sft", "--data", "chats.jsonl", "--config", "a.toml", "--learner.lr", "1e-5")
    run("export-trajectories", "--run", "runs/x", "--min-reward", "0.5", "--per-prompt", "2")
    assert calls == [
        ("sft", Path("a.toml"), Path("chats.jsonl"), ["--learner.lr", "1e-5"]),
        ("export_trajectories", Path("runs/x"), Path("demonstrations.jsonl"), 0.5, 2, None),
    ]


def test_m10_a_mistyped_command_is_answered_with_the_nearest(calls):
    result = run("chekc", "--config", "a.toml")
    assert result.exit_code == 2 and calls == []
    assert result.stderr == "error: unknown command 'chekc'; did you mean check\n"


@pytest.mark.parametrize("error", [ConfigError("a key is wrong"), PreflightError("a port is taken")])
def test_what_the_user_can_mend_is_one_line_and_a_failure(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(commands, "train", fail)
    result = run()
    assert result.exit_code == 2 and result.stderr == f"error: {error}\n"


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "train", fail)
    assert isinstance(run().exception, ZeroDivisionError)


def test_help_shows_examples_and_how_to_set_keys():
    shown = run("--help").stdout
    for word in ("train", "check", "eval", "status", "--learner.lr 2e-6", "--actors N", "check --keys"):
        assert word in shown, word


def test_keys_are_listed_with_default_and_documentation():
    shown = run("check", "--keys", "clip_ratio_high").stdout
    assert "--learner.clip_ratio_high" in shown and "0.28" in shown and "Upper clip" in shown
    assert run("check", "--keys", "no such word").exit_code == 2


@pytest.mark.parametrize("words", [["--help"], ["check", "--keys", "lr"], ["--conifg", "a.toml"]])
def test_the_command_line_answers_without_heavy_imports(words):
    code = (
        "import sys, launch\n"
        "try: launch.app(sys.argv[1:])\n"
        "finally: assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert "AssertionError" not in done.stderr and done.returncode in (0, 2)
