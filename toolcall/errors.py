"""The exceptions between tools, registry and executor.

Invariant: the text of each is one sentence that a user or the model can act on.
Tools raise the first two; the registry raises the others at load or before a call runs.
"""

from __future__ import annotations


class ToolError(Exception):
    """Raise this in a tool to give the model exactly this message."""


class ToolUnavailable(Exception):
    """Raise this in a tool when what it depends on (a server, a disk) is gone: not the model's fault.

    Counts towards the tool's breaker and is retried if the tool is idempotent. So does `ConnectionError`.
    """


class BadTool(TypeError):
    """A function that cannot become a tool, or a reference to one that leads nowhere."""


class InvalidArguments(ValueError):
    """The schema refused a call's arguments; the message names every field concerned."""
