"""Tools of MCP servers. The SDK takes a second to import, so only `tasks.loading` imports these modules, and
only when a task has a server."""
