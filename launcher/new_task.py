"""`launch.py new-task my_task`: a task that runs, to be changed into one's own.

Invariant: nothing that exists is overwritten. Called by `launcher.commands`.
"""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

from launcher.preflight import REPO, PreflightError

SKELETON = REPO / "tasks" / "skeleton"
PLACEHOLDER = "my_task"


def new_task(name: str, home: Path) -> list[Path]:
    """Write the skeleton into `home/name` under that name; its files. Raises PreflightError."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise PreflightError(f"{name!r} cannot be a Python module's name; use letters, digits and _")
    folder = home / name
    if folder.exists():
        raise PreflightError(f"{folder} exists already; give another name")
    if importlib.util.find_spec(name) is not None:
        raise PreflightError(f"there is a Python module called {name} already; give another name")
    folder.mkdir(parents=True)
    written = []
    for source in sorted(path for path in SKELETON.iterdir() if path.is_file()):
        target = folder / source.name.replace(PLACEHOLDER, name)
        text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written
