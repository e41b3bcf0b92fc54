"""The README's own-tool example, exactly as it stands there, on the packaged model."""

import json
import re
import subprocess

import pytest

from tests.integration.runs import ROOT, command

README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.slow


@pytest.fixture
def example(tmp_path):
    (python,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (toml,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_task.py").write_text(python)
    (tmp_path / "my_task.toml").write_text(toml)
    rows = [{"question": f"What is {i}?", "answer": str(i)} for i in range(30)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "my_task.toml"


def test_the_example_passes_its_check(example):
    done = subprocess.run(
        command("check", "--config", str(example)), cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Search the catalogue." in done.stdout and "What is " in done.stdout


def test_every_command_of_the_readme_exists():
    named = set(re.findall(r"launch\.py (check|eval|status|show|train)\b", README))
    done = subprocess.run(command("--help"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert named and all(name in done.stdout for name in named)
