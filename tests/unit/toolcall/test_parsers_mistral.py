"""Mistral's calls as Mistral's own tokenizers write them."""

from __future__ import annotations

import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from toolcall.parsers import make_parser


@pytest.mark.parametrize(
    "tokenizer",
    [MistralTokenizer.v3(), MistralTokenizer.v3(is_tekken=True), MistralTokenizer.v7()],
    ids=["v3", "v3-tekken", "v7"],
)
def test_the_calls_that_mistrals_tokenizers_write_are_read_with_their_ids(tokenizer):
    written = {"abc123xyz": "x", "def456uvw": "y"}
    calls = [
        ToolCall(id=key, function=FunctionCall(name="look", arguments=f'{{"q": "{value}"}}'))
        for key, value in written.items()
    ]
    results = [ToolMessage(content="84", tool_call_id=key, name="look") for key in written]
    request = ChatCompletionRequest(
        messages=[UserMessage(content="Q"), AssistantMessage(content=None, tool_calls=calls), *results]
    )
    text = tokenizer.encode_chat_completion(request).text.replace("▁", " ")
    found = make_parser("mistral").parse(text[text.index("[TOOL_CALLS]") : text.index("</s>")]).calls
    assert {call.id: getattr(call, "arguments", call) for call in found} == {
        key: {"q": value} for key, value in written.items()
    }
