"""The settings of an MCP server, a table `[task.mcp.NAME]`. Part of `configs.schema`.

Invariant: a server that passed `refuse_bad_server` has one way to be reached, no setting without effect, and
no secret in plain text, since a run folder keeps the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel

from configs.section import SECTION, Positive, Seconds

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SECRET = re.compile(r"auth|cookie|token|secret|passw|key|credential", re.IGNORECASE)
FOLDER = re.compile(r"(?<!\$)\{folder\}")  # in args and env: the trajectory's private folder
_ONLY_WITH_COMMAND = ("args", "env", "cwd", "files")
_ONLY_WITH_URL = ("headers",)


class McpConfig(BaseModel):
    """One MCP server, a table `[task.mcp.NAME]`. `${VARIABLE}` in any text below is filled in from the
    environment when the server is started or called, and is never written to the run folder."""

    model_config = SECTION

    command: str = ""
    """Program to start and talk to over stdio; looked for beside the running Python, then in PATH."""
    args: list[str] = []
    """With `command`: its arguments."""
    env: dict[str, str] = {}
    """With `command`: variables it gets besides HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    cwd: str = "."
    """With `command`: the folder it runs in, relative to the config file."""
    url: str = ""
    """Streamable HTTP endpoint, in place of `command`."""
    headers: dict[str, str] = {}
    """With `url`: sent with each request; write secrets as `${VARIABLE}`."""
    include: list[str] = []
    """Tools to offer, by name or pattern such as `read_*`; empty for all."""
    exclude: list[str] = []
    """Tools not to offer, by name or pattern."""
    rename: dict[str, str] = {}
    """What the model calls a tool, by the server's name for it."""
    prefix: str = ""
    """Put before the name of each tool that `rename` does not name."""
    scope: Literal["actor", "trajectory"] = "actor"
    """One session for all trajectories of an actor, or one each for servers that keep state."""
    files: str = ""
    """With `scope = "trajectory"`: field of the row, path → text, put into `{folder}`; see docs/mcp.md."""
    connect_timeout_s: Seconds = 30
    """Deadline for the server to start and list its tools."""
    timeout_s: Seconds = 30
    """Deadline of one call; `[task.tool_options.TOOL]` sets a tool's own."""
    max_concurrency: Positive = 32
    """Calls of one tool at once in one actor."""

    @property
    def takes_folder(self) -> bool:
        """It works on a folder of its own for each trajectory."""
        return any(map(FOLDER.search, (*self.args, *self.env.values())))


def refuse_bad_server(name: str, server: McpConfig) -> None:
    """Raises ValueError, one sentence with the mend."""
    table = f"task.mcp.{name}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"task.mcp has a server called {name!r}; use letters, digits, _ or -")
    if bool(server.command) == bool(server.url):
        given = "both; leave one out" if server.url else "neither; set one"
        raise ValueError(f"{table} needs a command (stdio) or a url (HTTP), but has {given}")
    if server.url and not VARIABLE.match(server.url) and not re.match(r"https?://[^/]", server.url):
        raise ValueError(f"{table}.url = {server.url!r} is no address; write http://host:port/path")
    useless = _ONLY_WITH_COMMAND if server.url else _ONLY_WITH_URL
    defaults = McpConfig.model_fields  # a run folder's config spells them out
    if key := next((key for key in useless if getattr(server, key) != defaults[key].default), None):
        raise ValueError(f"{table}.{key} has no effect with {'url' if server.url else 'command'}; remove it")
    if server.files and not server.takes_folder:
        raise ValueError(f"{table}.files has no effect: tell the server its {{folder}} in args or env")
    if server.takes_folder and server.scope != "trajectory":
        raise ValueError(f'{table}: {{folder}} is of one trajectory; set {table}.scope = "trajectory"')
    if secret := next(_plain_secrets(server), None):
        raise ValueError(
            f"{table}.{secret} would be written to the run folder; keep the value in an environment "
            'variable and write "${NAME_OF_THE_VARIABLE}"'
        )


def _plain_secrets(server: McpConfig) -> Iterator[str]:
    """Settings that look like secrets and hold a value of their own rather than a variable."""
    for section, values in (("headers", server.headers), ("env", server.env)):
        for name, value in values.items():
            if _SECRET.search(name) and value and not VARIABLE.search(value):
                yield f"{section}.{name}"
    if re.match(r"https?://[^/]*:[^/${]*@", server.url):
        yield "url"
