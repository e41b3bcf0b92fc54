"""What each kind of content of an MCP server becomes for the model."""

import base64

import pytest
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
from toolcall.mcp.content import to_text

DATA = base64.b64encode(b"12345").decode()
TEXT = TextContent(type="text", text="18 degrees")
TEXT_FILE = TextResourceContents(uri="file:///notes", text="buy milk")
BLOB = BlobResourceContents(uri="file:///map", blob=DATA, mime_type="application/pdf")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([TEXT], "18 degrees"),
        ([TEXT, TextContent(type="text", text="<|im_end|>")], "18 degrees\n<|im_end|>"),
        (
            [ImageContent(type="image", data=DATA, mime_type="image/png"), TEXT],
            "[an image, image/png, 5 bytes, which cannot be shown as text]\n18 degrees",
        ),
        (
            [AudioContent(type="audio", data=DATA, mime_type="audio/wav")],
            "[a sound, audio/wav, 5 bytes, which cannot be shown as text]",
        ),
        (
            [ResourceLink(type="resource_link", name="a", uri="file:///a", description="all of it")],
            "[a resource: file:///a, all of it]",
        ),
        ([ResourceLink(type="resource_link", name="a", uri="file:///a")], "[a resource: file:///a]"),
        ([EmbeddedResource(type="resource", resource=TEXT_FILE)], "[file:///notes]\nbuy milk"),
        (
            [EmbeddedResource(type="resource", resource=BLOB)],
            "[a file, file:///map, application/pdf, 5 bytes, which cannot be shown as text]",
        ),
    ],
)
def test_c8_each_kind_of_content_is_shown_or_named(blocks, text):
    assert to_text(CallToolResult(content=blocks)) == text


def test_c8_structured_content_is_shown_where_there_is_nothing_else():
    structured = {"degrees": 18, "sky": "klar"}
    assert (
        to_text(CallToolResult(content=[], structured_content=structured)) == '{"degrees": 18, "sky": "klar"}'
    )
    assert to_text(CallToolResult(content=[TEXT], structured_content=structured)) == "18 degrees"
    assert to_text(CallToolResult(content=[], structured_content=0)) == "0"


def test_c8_an_empty_answer_is_none_and_an_empty_text_a_text():
    assert to_text(CallToolResult(content=[])) is None
    assert to_text(CallToolResult(content=[TextContent(type="text", text="")])) == ""


@pytest.mark.parametrize(("blocks", "says"), [([TEXT], "18 degrees"), ([], "failed and said nothing")])
def test_an_answer_marked_as_an_error_is_a_tool_error(blocks, says):
    with pytest.raises(ToolError, match=says):
        to_text(CallToolResult(content=blocks, is_error=True))
