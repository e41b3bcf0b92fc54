"""From the servers of a task's config to tools.

Invariant: every server was started and asked for its tools once, all at the same time, before this returns;
what is wrong with one comes out as one BadServer sentence. The tools' own sessions open at the first call, in
the event loop of the caller. Called by `tasks.loading`.
"""

from __future__ import annotations

import asyncio
import difflib
import glob
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

import mcp_types
from mcp import Client

from configs.mcp_servers import McpConfig
from toolcall.mcp.client import all_tools, in_words, no_answer
from toolcall.mcp.server import BadServer, Server
from toolcall.mcp.tool import make_tools
from toolcall.registry import Tool


def load_mcp_tools(servers: Mapping[str, McpConfig], config_dir: Path) -> list[Tool]:
    """The chosen tools of all servers. Raises BadServer or BadTool."""
    ends = [Server(name, config, config_dir) for name, config in servers.items()]
    for server in ends:
        server.check()
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        listings = thread.submit(asyncio.run, _list_all(ends)).result()
    tools: list[Tool] = []
    for server, offered in zip(ends, listings, strict=True):
        tools += make_tools(server, list(_chosen(server, offered)))
    return tools


async def _list_all(servers: Sequence[Server]) -> list[list[mcp_types.Tool]]:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as empty:  # for those that serve a folder
        ends = [server.in_folder(Path(empty)) for server in servers]
        answers = await asyncio.gather(*map(_list, ends), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _list(server: Server) -> list[mcp_types.Tool]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        try:
            async with asyncio.timeout(server.config.connect_timeout_s):
                async with Client(server.transport(stderr), cache=None) as client:
                    return await all_tools(client)
        except TimeoutError:
            reason = no_answer(server.name, server.config)
        except Exception as error:  # noqa: BLE001 - whatever keeps it from starting is told to the user
            reason = in_words(error)
        raise BadServer(f"MCP server {server.name!r} cannot be used: {reason}{_last_words(stderr)}")


def _last_words(stderr: IO[str]) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr if line.strip()]
    return f"; the last that it said: {lines[-1]}" if lines else ""


def _chosen(server: Server, offered: Sequence[mcp_types.Tool]) -> Iterator[tuple[str, mcp_types.Tool]]:
    """The tools that the config wants, by the name that the model calls them."""
    config, names = server.config, [tool.name for tool in offered]
    table = f"task.mcp.{server.name}"
    for key in ("include", "exclude"):
        _refuse_idle(f"{table}.{key}", getattr(config, key), names)
    included = [name for name in names if not config.include or _matches(name, config.include)]
    chosen = [name for name in included if not _matches(name, config.exclude)]
    if not chosen:
        raise BadServer(f"{table} gives no tool; the server offers: {_listed(names)}")
    _refuse_idle(f"{table}.rename", map(glob.escape, config.rename), chosen)
    for tool in offered:
        if tool.name in chosen:
            yield config.rename.get(tool.name, config.prefix + tool.name), tool


def _refuse_idle(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Each pattern must fit a name."""
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}? There are" if near else "there are"
            raise BadServer(f"{key} has {pattern!r}, which no tool is called; {hint}: {_listed(names)}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
