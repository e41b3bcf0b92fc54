"""An MCP server for a small file system: the text files of one folder.

    python tasks/servers/files.py FOLDER        speaks MCP over stdio

Invariant: no path leads out of the folder. A program of its own that imports the SDK alone, so that a server
for each trajectory starts quickly. `configs/mcp_files_cpu.toml` uses it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

MAX_FILES = 100
MAX_CHARS = 20_000  # of one file
MAX_PATH = 60  # characters; the longest of them have four bytes, and a name may have 255


class Files:
    """Each method is a tool; paths are relative to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def list_files(self) -> str:
        """List all files."""
        return "\n".join(self._paths()) or "no files"

    def read_file(self, path: str) -> str:
        """Show a file."""
        return self._existing(path).read_bytes().decode("utf-8", "replace")

    def write_file(self, path: str, text: str) -> str:
        """Make a file, or replace its text."""
        target = self._inside(path)
        if len(text) > MAX_CHARS:
            raise ToolError(f"the text has {len(text)} characters; a file may have {MAX_CHARS}")
        if not target.exists() and len(self._paths()) >= MAX_FILES:
            raise ToolError(f"there are {MAX_FILES} files already; delete one first")
        self._make_room(target, path)
        target.write_text(text, "utf-8", newline="")
        return f"wrote {path}"

    def move_file(self, source: str, target: str) -> str:
        """Give a file another path."""
        found, wanted = self._existing(source), self._inside(target)
        if wanted.exists():
            raise ToolError(f"{target} exists already")
        self._make_room(wanted, target)
        found.rename(wanted)
        return f"moved {source} to {target}"

    def delete_file(self, path: str) -> str:
        """Delete a file."""
        self._existing(path).unlink()
        return f"deleted {path}"

    def _paths(self) -> list[str]:
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self._folder).as_posix() for path in files)

    def _inside(self, path: str) -> Path:
        if "\0" in path or len(path) > MAX_PATH:
            raise ToolError(f"{path[:MAX_PATH]!r} is no path")
        target = (self._folder / path).resolve()
        if target == self._folder or not target.is_relative_to(self._folder):
            raise ToolError(f"{path!r} is not below the folder; paths are relative, such as notes.txt")
        return target

    def _existing(self, path: str) -> Path:
        target = self._inside(path)
        if not target.is_file():
            raise ToolError(f"there is no file {path!r}; the files are: {', '.join(self._paths()) or 'none'}")
        return target

    def _make_room(self, target: Path, path: str) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"{path!r} cannot be made: a file is in the way") from error
        if target.is_dir():
            raise ToolError(f"{path!r} is a folder")


def serve(folder: Path) -> None:
    server, files = MCPServer("files", log_level="WARNING"), Files(folder)
    for tool in (files.list_files, files.read_file, files.write_file, files.move_file, files.delete_file):
        server.add_tool(tool)
    server.run("stdio")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
