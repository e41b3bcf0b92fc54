"""The calculator task with its tool on an MCP server, and that server: an example of both.

    python -m tasks.calculator_mcp          the server, over stdio
    python -m tasks.calculator_mcp 8000     the server, at http://127.0.0.1:8000/mcp

`configs/calculator_mcp.toml` trains with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from tasks.calculator import calculator_task
from tasks.types import Task


def task(seed: int, **options: Any) -> Task:
    """`tasks.calculator` without a tool of its own: the config's server has it."""
    return replace(calculator_task(seed, **options), tools=())


def serve(port: int | None) -> None:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError as Refused

    from toolcall.errors import ToolError
    from toolcall.tools.calculator import calculator as local

    server = MCPServer("calculator", log_level="WARNING")

    @server.tool(description=local.description)
    async def calculator(expression: str) -> str:
        try:
            return await local(expression)
        except ToolError as error:
            raise Refused(str(error)) from error

    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if sys.argv[1:] else None)
