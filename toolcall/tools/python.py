"""`python`: a model's code, run in the sandbox, its output as the result.

Invariant: nothing that the code does is told as a failure of the tool; only a machine without a working
sandbox is. A call runs in a box of its own, or in its trajectory's session. Configured by `python_tool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from toolcall.errors import ToolError, ToolUnavailable
from toolcall.registry import Tool, tool
from toolcall.sandbox import Ended, Limits, RunResult, Sandbox, SandboxUnavailable, Session
from toolcall.sandbox.protections import measure
from toolcall.sandbox.unsafe import run_unprotected
from toolcall.types import ToolContext

QUEUE_S = 20.0  # beyond the code's own time: for a starved machine to make a box and deliver the output
_ENDS = {
    Ended.TIMEOUT: "stopped after {wall_s:g} seconds",
    Ended.CPU: "stopped after {cpu_s:g} seconds of CPU",
    Ended.MEMORY: "stopped: it used more than {memory_mb} MB of memory",
    Ended.OUTPUT: "stopped: it wrote more than {output_bytes} bytes",
    Ended.BROKEN: "stopped: it damaged the interpreter",
}


def python_tool(
    *,
    session: bool = False,
    wall_s: float = 10.0,
    cpu_s: float = 10.0,
    memory_mb: int = 512,
    disk_mb: int = 64,
    processes: int = 32,
    preload: Sequence[str] = (),
    max_concurrency: int = 8,
    unsafe_no_sandbox: bool = False,
) -> Tool:
    """The `python` tool under these limits (see `toolcall.sandbox.Limits`).

    session: variables and files live on from call to call of a trajectory. preload: modules that code often
    imports (`sympy`), imported once. max_concurrency: runs at once in one actor. unsafe_no_sandbox: run
    without any sandbox, able to read, change and send whatever this user can (docs/security.md).
    """
    if unsafe_no_sandbox and session:
        raise ValueError("session = true needs the sandbox; leave one of session and unsafe_no_sandbox out")
    runner = _Runner(Limits(wall_s, cpu_s, memory_mb, disk_mb, processes), preload)
    run = runner.in_session if session else runner.unprotected if unsafe_no_sandbox else runner.once
    kept = "Variables and files are kept between calls." if session else "Every call starts afresh."

    async def python(code: str, context: ToolContext) -> str:
        return await run(code, context)

    python.__doc__ = f"""Run Python code and return what it prints, and the value of a last expression. {kept}

    Args:
        code: Python source. No network; files only below the working folder.
    """
    made = tool(timeout=wall_s + QUEUE_S, max_concurrency=max_concurrency)(python)
    if unsafe_no_sandbox:
        return replace(made, prepare=_warn)
    return replace(made, prepare=runner.prepare, probe=runner.probe, shutdown=runner.close)


class _Runner:
    """The sandbox of one tool: started at its first call, one for each event loop."""

    def __init__(self, limits: Limits, preload: Sequence[str]) -> None:
        self._limits = limits
        self._preload = tuple(preload)
        self._sandbox: Sandbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def once(self, code: str, context: ToolContext) -> str:
        try:
            result = await self._started().run(code, echo=True)
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        return self._told(result)

    async def unprotected(self, code: str, context: ToolContext) -> str:
        return self._told(await run_unprotected(code, self._limits, echo=True))

    async def prepare(self) -> str:
        """Says which protections hold here. Raises ToolUnavailable if there is no sandbox."""
        try:
            async with Sandbox(self._limits, preload=self._preload) as sandbox:
                held = await measure(sandbox)
        except SandboxUnavailable as error:
            raise ToolUnavailable(
                f"{error}; see docs/security.md for what it needs, or set unsafe_no_sandbox = true in the "
                "options of toolcall.tools.python:python_tool to run the model's code unprotected"
            ) from error
        return f"sandbox: {', '.join(protection.name for protection in held)}"

    async def probe(self) -> None:
        try:
            await self._started().start()
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error

    async def close(self) -> None:
        if self._sandbox is not None and self._loop is asyncio.get_running_loop():
            await self._sandbox.close()

    async def in_session(self, code: str, context: ToolContext) -> str:
        kept: _Kept = context.state.setdefault("python session", _Kept())
        async with kept.lock:  # calls of one turn run one after another, in call order
            try:
                if kept.session is None:
                    block = self._started().session()
                    kept.session = await context.resources.enter_async_context(block)
                result = await kept.session.run(code, echo=True)
            except SandboxUnavailable as error:
                kept.session = None
                raise ToolUnavailable(str(error)) from error
            except asyncio.CancelledError:
                kept.session = None
                raise
            if not kept.session.alive:
                kept.session = None
                return self._told(result, "variables and files of earlier calls are gone")
            return self._told(result)

    def _started(self) -> Sandbox:
        loop = asyncio.get_running_loop()
        if self._sandbox is None or self._loop is not loop:
            self._sandbox, self._loop = Sandbox(self._limits, preload=self._preload), loop
        return self._sandbox

    def _told(self, result: RunResult, lost: str = "") -> str:
        """The output, if all went well. Raises ToolError with the output and what went wrong."""
        if result.ok and not lost:
            return (result.stdout + result.stderr).rstrip("\n") or "(no output)"
        parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
        if result.ended in _ENDS:
            parts.append(_ENDS[result.ended].format(**vars(self._limits)))
        elif result.ended is Ended.SIGNALLED:
            parts.append(f"the interpreter crashed (signal {-(result.exit_code or 0)})")
        elif lost or not result.stderr:
            parts.append(f"exited with code {result.exit_code}")
        parts.append(lost)
        raise ToolError("\n".join(part for part in parts if part))


async def _warn() -> str:
    return "UNSAFE: no sandbox; the model's code can read, change and send whatever this user can"


class _Kept:
    """A trajectory's session."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.lock = asyncio.Lock()


python = python_tool()
