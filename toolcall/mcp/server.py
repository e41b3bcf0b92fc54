"""How one MCP server is reached: a command to start, or an address.

Invariant: what a `Server` was made of exists here and now (the program, the folder, the environment
variables), and the values of `${VARIABLE}` are read from the environment only when a connection is opened,
so they are in no config, message or log. Called by `toolcall.mcp.loading` and `toolcall.mcp.client`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import httpx2
from mcp.client import Transport
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from configs.mcp_servers import FOLDER, VARIABLE, McpConfig
from toolcall.mcp.http import OneByOneClient

TETHER = Path(__file__).with_name("tether.py")
_READ_MARGIN_S = 60.0  # an HTTP response may be silent for a call's deadline and this much more
_KEEPALIVE_S = 2.0


class BadServer(ValueError):
    """An MCP server that cannot be used, in one sentence with the mend."""


@dataclass(frozen=True)
class Server:
    """`name` is that of the table `[task.mcp.NAME]`; `config_dir` is what `cwd` is relative to."""

    name: str
    config: McpConfig
    config_dir: Path

    def check(self) -> None:
        """Raises BadServer if the program, the folder or a variable is missing."""
        config = self.config
        texts = {"url": config.url, "command": config.command, "cwd": config.cwd}
        texts |= {f"args[{i}]": text for i, text in enumerate(config.args)}
        texts |= {f"headers.{key}": text for key, text in config.headers.items()}
        texts |= {f"env.{key}": text for key, text in config.env.items()}
        for key, text in texts.items():
            self._refuse_missing_variable(key, text)
        if config.command:
            self._refuse_missing_program()

    def in_folder(self, folder: Path) -> Server:
        """The same with that folder in place of `{folder}`."""

        def fill(text: str) -> str:
            return FOLDER.sub(lambda _: str(folder), text)

        config = self.config
        filled = {"args": [*map(fill, config.args)], "env": {k: fill(v) for k, v in config.env.items()}}
        return replace(self, config=config.model_copy(update=filled))

    def transport(self, errors: TextIO) -> Transport:
        """A new connection, not yet opened. A program's stderr goes to `errors`, which has a descriptor."""
        return self._http() if self.config.url else self._stdio(errors)

    def _stdio(self, errors: TextIO) -> Transport:
        config = self.config
        tether = [str(TETHER), str(os.getpid()), _filled(config.command)]
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-IS", *tether, *map(_filled, config.args)],
            env={"PATH": _path()} | {key: _filled(text) for key, text in config.env.items()},
            cwd=self._folder(),
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errors)

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        config = self.config
        headers = {key: _filled(text) for key, text in config.headers.items()}
        timeout = httpx2.Timeout(config.connect_timeout_s, read=config.timeout_s + _READ_MARGIN_S)
        # The tools' own limits hold. Servers close idle connections, often after 5 s, and one that is used at
        # that moment costs a call.
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        async with (
            OneByOneClient(headers=headers, timeout=timeout, limits=limits) as client,
            streamable_http_client(_filled(config.url), http_client=client) as streams,
        ):
            yield streams

    def _folder(self) -> Path:
        return (self.config_dir / _filled(self.config.cwd)).resolve()

    def _refuse_missing_variable(self, key: str, text: str) -> None:
        for variable in VARIABLE.findall(text):
            if variable not in os.environ:
                raise BadServer(
                    f"task.mcp.{self.name}.{key} uses ${{{variable}}}, but the environment has no "
                    f"{variable}; export it where the run is started"
                )

    def _refuse_missing_program(self) -> None:
        command, folder = _filled(self.config.command), self._folder()
        if not folder.is_dir():
            raise BadServer(f"task.mcp.{self.name}.cwd leads to {folder}, which is no folder; mend the path")
        if os.sep in command:
            found = os.access(folder / command, os.X_OK)
        else:
            found = shutil.which(command, path=_path()) is not None
        if not found:
            raise BadServer(
                f"task.mcp.{self.name}.command = {self.config.command!r} is no program that can be started; "
                "install it, or give its path"
            )


def _filled(text: str) -> str:
    """`${VARIABLE}` replaced by its value."""
    return VARIABLE.sub(lambda match: os.environ[match[1]], text)


def _path() -> str:
    """Programs of the running Python's environment first: `python` is the one that runs us."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
