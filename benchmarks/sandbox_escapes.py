"""What happens when code tries to get out of the sandbox? Every attempt is really made.

    python benchmarks/sandbox_escapes.py [WORD]        only attempts with WORD in their name

Held: the code did not get what it wanted, its run ended in an expected way within the limits, a canary
process of the host lives, a server on the host had no visitor, and no process of the box is left. Limits are
tiny, so that a hole would cost the machine little. Exits with 1 if anything was not held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sandbox_attempts import ATTEMPTS, HEAD, Attempt
from toolcall.sandbox import Limits, RunResult, Sandbox

LIMITS = Limits(wall_s=5, cpu_s=0.5, memory_mb=96, disk_mb=8, processes=8, open_files=32, output_bytes=20_000)
GONE_S = 5.0  # for the kernel to end what was killed


@dataclass(frozen=True)
class Facts:
    """What the host has that the code would like to have."""

    secret: str  # also in the environment of the process that starts the sandbox
    secret_file: Path
    outside: Path  # a file that must not come to be
    port: int  # of a server that must have no visitor
    canary: int  # a process that must live
    marker: str  # in the command line of what a box may try to leave behind
    home: Path
    repository: Path = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    attempt: Attempt
    result: RunResult
    problems: tuple[str, ...]  # empty: held

    def says(self) -> str:
        """The line that shows best what happened."""
        lines = (self.result.stdout + self.result.stderr).strip().splitlines()
        telling = [line for line in lines if self.attempt.says and self.attempt.says in line]
        return (telling or lines[-1:] or [""])[0]


async def make_attempt(sandbox: Sandbox, attempt: Attempt, facts: Facts, server: socket.socket) -> Row:
    """Run one attempt and look at what it achieved, in its output and from outside."""
    code = HEAD + string.Template(attempt.code).safe_substitute(vars(facts))
    if attempt.session:
        async with sandbox.session() as session:
            result = await session.run(code)
    else:
        result = await sandbox.run(code)
    output = result.stdout + result.stderr
    got = any(line.startswith("GOT") for line in result.stdout.splitlines()) or facts.secret in output
    found = {
        "it got through": got,
        f"it ended as {result.ended}": result.ended not in attempt.ends,
        f"it did not say {attempt.says!r}": attempt.says not in output,
        "the canary is dead": not psutil.pid_exists(facts.canary),
        "it wrote outside": facts.outside.exists(),
        "the server had a visitor": _visited(server),
        "it left a process": await _left_behind(facts.marker),
    }
    return Row(attempt, result, tuple(what for what, is_so in found.items() if is_so))


@contextmanager
def host() -> Iterator[tuple[Facts, socket.socket]]:
    """The things that `Facts` names, for as long as the block runs."""
    canary = subprocess.Popen(["sleep", "600"])
    try:
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            secret = os.environ["SLIPSTREAM_CANARY"] = secrets.token_hex(8)
            secret_file = Path(folder, "secret")
            secret_file.write_text(secret, encoding="utf-8")
            marker = f"98{secrets.randbelow(10**7):07d}"
            port = server.getsockname()[1]
            outside = Path(folder, "outside")
            yield Facts(secret, secret_file, outside, port, canary.pid, marker, Path.home()), server
    finally:
        os.environ.pop("SLIPSTREAM_CANARY", None)
        canary.kill()
        canary.wait()


def _visited(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


async def _left_behind(marker: str) -> bool:
    """Whether a process with the marker is still there once the kernel had time to end it."""
    deadline = asyncio.get_running_loop().time() + GONE_S
    while any(marker in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        if asyncio.get_running_loop().time() > deadline:
            return True
        await asyncio.sleep(0.05)
    return False


async def make_attempts(word: str) -> list[Row]:
    with host() as (facts, server):
        async with Sandbox(LIMITS) as sandbox:
            return [
                await make_attempt(sandbox, attempt, facts, server)
                for attempt in ATTEMPTS
                if word in attempt.name
            ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="")
    rows = asyncio.run(make_attempts(parser.parse_args().word))
    table = Table("attempt", "ended", "after", "what it saw", "held")
    for row in rows:
        verdict = "[red]" + escape("; ".join(row.problems)) if row.problems else "[green]yes"
        ended = str(row.result.ended) + (
            f" {row.result.exit_code}" if row.result.exit_code is not None else ""
        )
        table.add_row(
            row.attempt.name, ended, f"{row.result.wall_s:.2f} s", escape(row.says()[:110]), verdict
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
