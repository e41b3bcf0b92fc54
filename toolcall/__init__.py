"""Tools: declaring them, reading calls of them out of a model's text, running them."""

from toolcall.errors import BadTool, InvalidArguments, ToolError, ToolUnavailable
from toolcall.executor import Executor
from toolcall.options import ToolOptions
from toolcall.output import cut_to_budget
from toolcall.registry import Tool, load_tools, schema_tool, tool
from toolcall.types import Outcome, ParseFailure, ToolCall, ToolContext, ToolResult

__all__ = [
    "BadTool",
    "Executor",
    "InvalidArguments",
    "Outcome",
    "ParseFailure",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolOptions",
    "ToolResult",
    "ToolUnavailable",
    "cut_to_budget",
    "load_tools",
    "schema_tool",
    "tool",
]
