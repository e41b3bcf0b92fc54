"""The JSON-lines sink, and what is refused before a run."""

import importlib.util
import json

import pytest

from metrics.sinks import Report, missing_library, open_sinks

REPORT = Report(1700000000.1234, 3, "learner", "learner-0", {"learner/loss": 0.5})


def test_json_lines_are_appended_report_by_report(tmp_path):
    for _ in range(2):  # a run and its resumption
        (sink,) = open_sinks(["jsonl"], tmp_path, tmp_path / "metrics.jsonl", {})
        sink.write(REPORT)
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = {
        "time": 1700000000.123,
        "step": 3,
        "role": "learner",
        "name": "learner-0",
        "metrics": {"learner/loss": 0.5},
    }
    assert lines == [expected, expected]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    (sink,) = open_sinks(["jsonl"], tmp_path, tmp_path / "metrics.jsonl", {})
    sink.write(REPORT)
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    sink.close()


def test_a_sink_whose_library_is_missing_is_named_with_the_mend(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_library(["jsonl"]) is None
    problem = missing_library(["jsonl", "wandb"])
    assert problem == "launch.sinks names wandb, which is not installed; `pip install wandb` or take it out"


def test_tensorboard_takes_a_report(tmp_path):
    pytest.importorskip("tensorboard")
    (sink,) = open_sinks(["tensorboard"], tmp_path, tmp_path / "metrics.jsonl", {})
    sink.write(REPORT)
    sink.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"learner-0/learner/loss" in events.read_bytes()
