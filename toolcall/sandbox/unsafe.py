"""Running code without a sandbox, for machines that offer none and users who say so by name.

Invariant: only rlimits, a process group of its own and a deadline; the code can read and send whatever this
user can. Used by `toolcall.tools.python` with `unsafe_no_sandbox = true`, never by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from toolcall.sandbox.server import BOOT, ENVIRONMENT, PACKAGE
from toolcall.sandbox.types import Ended, Limits, RunResult

_MAIN = "from toolcall.sandbox.worker import run_unprotected\nrun_unprotected()\n"


async def run_unprotected(code: str, limits: Limits, *, echo: bool = False) -> RunResult:
    """Run `code` as a script in an empty temporary folder."""
    request = {"limits": vars(limits), "code": code, "stdin": "", "files": {}, "echo": echo}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as top:
        process = _launch(Path(top), json.dumps(request))
        try:
            exit_code = await asyncio.to_thread(process.wait, limits.wall_s)
            ended = Ended.SIGNALLED if exit_code < 0 else Ended.EXITED
        except subprocess.TimeoutExpired:
            ended, exit_code = Ended.TIMEOUT, None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what has left the group lives on
            process.wait()
        outputs = [_read(Path(top, name), limits.output_bytes + 1) for name in ("stdout", "stderr")]
    if sum(map(len, outputs)) > limits.output_bytes:
        ended, exit_code = Ended.OUTPUT, None
    stdout, stderr = (output[: limits.output_bytes].decode("utf-8", "replace") for output in outputs)
    return RunResult(ended, exit_code, stdout, stderr, time.monotonic() - started, 0.0)


def _read(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit)


def _launch(top: Path, request: str) -> subprocess.Popen[bytes]:
    """Streams are files, so nothing waits for a daemon that holds one open."""
    work = top / "work"
    work.mkdir()
    (top / "stdin").write_text(request, encoding="utf-8")
    files = (top / "stdin").open("rb"), (top / "stdout").open("wb"), (top / "stderr").open("wb")
    with files[0] as stdin, files[1] as out, files[2] as err:
        return subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-c", BOOT + _MAIN, str(PACKAGE)],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=work,
            start_new_session=True,
            env=ENVIRONMENT | {"HOME": str(work), "TMPDIR": str(work)},
        )
