"""`new-task`: what it writes loads, passes its own test and checks; nothing is overwritten."""

import os
import subprocess
import sys

import pytest

from configs.load import load_config
from launcher.new_task import new_task
from launcher.preflight import REPO, PreflightError
from tasks import load_task


def test_the_skeleton_loads_and_its_own_test_passes(tmp_path):
    files = new_task("shop_prices", tmp_path)
    assert [file.name for file in files] == [
        "shop_prices.jsonl",
        "shop_prices.py",
        "shop_prices.toml",
        "test_shop_prices.py",
    ]
    assert not any("my_task" in file.read_text() for file in files)
    loaded = load_config(tmp_path / "shop_prices" / "shop_prices.toml")
    assert loaded.warnings == ()
    task = load_task(loaded.config.task, loaded.config_dir, 0)
    assert [m["role"] for m in task.make_messages(task.train[0])] == [
        "system",
        *["user", "assistant"] * 2,
        "user",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "shop_prices")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-task", "cannot be a Python module"),
        ("class", "cannot be a Python module"),
        ("json", "a Python module called json"),
        ("taken", "exists already"),
    ],
)
def test_names_that_would_not_work_are_refused(tmp_path, name, says):
    (tmp_path / "taken").mkdir()
    with pytest.raises(PreflightError, match=says):
        new_task(name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
