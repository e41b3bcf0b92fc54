"""A private folder for each trajectory, filled from its row: what its MCP servers work on.

Invariant: made at the first call, removed at the trajectory's end after its servers have ended, and nothing
of a row is written outside it. Rewards read it at `context.state["folder"]`, which is not there if no call
was made. Called by `toolcall.mcp.tool`, and by `tasks.loading` to check rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from toolcall.types import ToolContext

STATE = "folder"


class BadFiles(ValueError):
    """A row's files cannot be written; says why."""


def own_folder(context: ToolContext, field: str) -> Path:
    """This trajectory's folder, with the row's files of `field` in it. Its servers share it."""
    if STATE not in context.state:
        made = tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True)
        context.state[STATE] = Path(context.resources.enter_context(made)).resolve()
    if field and f"{STATE}: {field}" not in context.state:
        context.state[f"{STATE}: {field}"] = True  # a second server must not undo what the first has done
        _write(context.state[STATE], context.row[field])
    return context.state[STATE]


def check_files(row: Mapping[str, Any], field: str) -> None:
    """Raises BadFiles unless the row's field is path → text, each path below the folder."""
    files = row.get(field)
    if not isinstance(files, Mapping):
        raise BadFiles(f"no {field!r} of paths and texts; the row has: {', '.join(row) or 'nothing'}")
    for path, text in files.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise BadFiles(f"{field}: {path!r} is no path below the folder")
        if any(str(parent) in files for parent in PurePosixPath(path).parents):
            raise BadFiles(f"{field}: {path!r} lies in what is itself a file")
        if not isinstance(text, str):
            raise BadFiles(f"{field}: {path!r} must be text, not {type(text).__name__}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
