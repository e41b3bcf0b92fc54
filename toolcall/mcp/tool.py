"""The tools of one MCP server, as the executor runs them. Called by `toolcall.mcp.loading`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mcp_types

from toolcall.errors import BadTool
from toolcall.mcp.client import McpClient
from toolcall.mcp.folder import own_folder
from toolcall.mcp.server import BadServer, Server
from toolcall.registry import Tool, schema_tool
from toolcall.types import ToolContext


def make_tools(server: Server, offered: Sequence[tuple[str, mcp_types.Tool]]) -> list[Tool]:
    """offered: each with the name that the model calls it. Raises BadServer."""
    schemas = {tool.name: tool.input_schema for _, tool in offered}
    shared = McpClient(server, schemas) if server.config.scope == "actor" else None
    clients = (lambda _: shared) if shared else (lambda context: _own_client(context, server, schemas))
    return [_make(server, name, tool, clients, shared) for name, tool in offered]


def _make(
    server: Server,
    name: str,
    offered: mcp_types.Tool,
    clients: Callable[[ToolContext], McpClient],
    shared: McpClient | None,
) -> Tool:
    async def call(arguments: dict[str, Any], context: ToolContext) -> str | None:
        return await clients(context).call(offered.name, arguments)

    try:
        return schema_tool(
            name,
            offered.description or offered.title or name,
            offered.input_schema,
            call,
            shutdown=shared.close if shared else None,
            probe=shared.probe if shared else None,
            timeout=server.config.timeout_s,
            max_concurrency=server.config.max_concurrency,
        )
    except BadTool as error:
        raise BadServer(
            f"task.mcp.{server.name} offers a tool that cannot be used: {error}; or leave it out by "
            f'exclude = ["{offered.name}"], or give it a name by rename = {{ "{offered.name}" = "…" }}'
        ) from error


def _own_client(context: ToolContext, server: Server, schemas: Mapping[str, Any]) -> McpClient:
    """The trajectory's own session, which ends with the trajectory."""
    key = f"MCP server {server.name}"
    if key not in context.state:
        if server.config.takes_folder:
            server = server.in_folder(own_folder(context, server.config.files))
        client = context.state[key] = McpClient(server, schemas, one_session=True)
        context.resources.push_async_callback(client.close)
    return context.state[key]
