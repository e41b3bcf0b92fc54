"""The answer of an MCP server → text for the model.

Invariant: text comes through as it is; whatever a language model cannot read is named with its kind and
size, never dropped; an answer marked `is_error` is a `ToolError`. Called by `toolcall.mcp.client`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from toolcall.errors import ToolError


def to_text(result: CallToolResult) -> str | None:
    """The blocks, one after the other; structured content only where there are no blocks, since servers
    put it into a block as well. None for an empty answer. Raises ToolError for an error."""
    text = _joined(result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolError(text or "the tool failed and said nothing")
    return text if result.content or result.structured_content is not None else None


def _joined(blocks: Sequence[Any]) -> str:
    return "\n".join(_block(block) for block in blocks)


def _block(block: Any) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent():
            return _unreadable("an image", block.mime_type, block.data)
        case AudioContent():
            return _unreadable("a sound", block.mime_type, block.data)
        case ResourceLink():
            about = f", {block.description}" if block.description else ""
            return f"[a resource: {block.uri}{about}]"
        case EmbeddedResource(resource=TextResourceContents() as file):
            return f"[{file.uri}]\n{file.text}"
        case EmbeddedResource(resource=BlobResourceContents() as file):
            return _unreadable(f"a file, {file.uri}", file.mime_type, file.blob)
    return f"[content of type {type(block).__name__}, which cannot be shown as text]"


def _unreadable(what: str, mime_type: str | None, base64: str) -> str:
    size = len(base64.rstrip("=")) * 3 // 4
    kind = f", {mime_type}" if mime_type else ""
    return f"[{what}{kind}, {size} bytes, which cannot be shown as text]"
