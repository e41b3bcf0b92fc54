"""Running a model's Python code where it can hurt nobody. What holds and what does not: docs/security.md."""

from toolcall.sandbox.client import Sandbox, Session
from toolcall.sandbox.types import Ended, Limits, RunResult, SandboxUnavailable

__all__ = ["Ended", "Limits", "RunResult", "Sandbox", "SandboxUnavailable", "Session"]
