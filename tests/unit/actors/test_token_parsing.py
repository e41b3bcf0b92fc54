"""Calls found at token level by the `renderers` package, and what is mended in what it finds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.renderer import RendererError, make_renderer
from tests.tiny import tiny_tokenizer
from tests.unit.actors.support import make_task
from toolcall.parsers import make_parser
from toolcall.types import CallSpan, Outcome, ParseFailure, ToolCall, ToolResult

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
KIMI = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[BOS]", "[EOS]")
CALLS = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
DEEPSEEK = ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")
PARTS = ("calls", "call", "outputs", "output")
DEEPSEEK += tuple(f"tool▁{part}▁{side}" for part in PARTS for side in ("begin", "end"))
FAMILIES = {
    "deepseek-v3": (*TAGS[:2], *(f"<｜{name}｜>" for name in DEEPSEEK)),
    "qwen3": (*CHATML, *TAGS),
    "qwen3.5": (*CHATML, *TAGS, *VISION),
    "llama-3": tuple(f"<|{t}|>" for t in (
        "begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag"
    )),
    "glm-4.5": (
        *TAGS, *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation", "endoftext")),
        "[gMASK]", "<sop>", "/nothink", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    "kimi-k2": (*CHATML, *KIMI, *TAGS[:2], *(f"<|tool_{part}|>" for part in CALLS)),
}  # fmt: skip
ASK = {"role": "user", "content": "Q"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'


@cache
def tokenizer_of(family: str) -> Any:
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(FAMILIES[family])})
    return made


@cache
def renderer_of(family: str) -> Any:
    return make_renderer(
        tokenizer_of(family), make_task("hermes", parser=None, tools_in_prompt=False), family
    )


def parse(text: str, family: str = "qwen3", prompt: str = "", **options: Any):
    sampled = tokenizer_of(family).encode(text, add_special_tokens=False)
    before = tokenizer_of(family).encode(f"<|im_start|>assistant\n{prompt}")
    return renderer_of(family).parse(before, sampled, **({"truncated": False} | options))


def calls(text: str, **options: Any) -> list[ToolCall | ParseFailure]:
    return list(parse(text, **options).calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_the_package_writes_is_read_back(family):
    renderer, tokenizer = renderer_of(family), tokenizer_of(family)
    assert str(renderer.syntax) == (
        f"call syntax {family}: token by token by the renderers package, which knows {family!r}"
    )
    function = {"name": "calculator", "arguments": {"expression": "1+1"}}
    call_id = "functions.calculator:0"
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    prompt = renderer.prompt([ASK])
    whole = renderer._renderer.render_ids([ASK, turn], tools=renderer._schemas)
    sampled = whole[len(renderer._renderer.render_ids([ASK], tools=renderer._schemas)) :]
    (call,) = renderer.parse(prompt, sampled, truncated=False).calls
    assert (call.name, call.arguments) == ("calculator", {"expression": "1+1"})
    assert call.id == (call_id if family == "kimi-k2" else "call_0")
    start, end = call.position
    shown = renderer.text(sampled)[start:end]
    assert "1+1" in shown and "calculator" in shown and "<think>" not in shown
    offered = "calculator" in tokenizer.decode(prompt)
    assert offered == (family != "deepseek-v3")  # whose own template shows no tools


@pytest.mark.parametrize(
    ("family", "parser", "count"),
    [
        ("qwen3", "hermes", 2),
        ("qwen3.5", "qwen3_coder", 2),
        ("deepseek-v3", "deepseek", 2),
        ("llama-3", "llama3_json", 1),
    ],
)
def test_the_text_parsers_read_what_the_package_writes_too(family, parser, count):
    renderer = renderer_of(family)
    written = [{"expression": f"{number}+1"} for number in range(count)]
    functions = [{"name": "calculator", "arguments": arguments} for arguments in written]
    tool_calls = [{"id": f"c{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    ids = renderer._renderer.render_ids([ASK, turn], tools=renderer._schemas)
    before = renderer._renderer.render_ids([ASK], tools=renderer._schemas)
    found = make_parser(parser).parse(renderer.text(ids[len(before) :])).calls
    assert [getattr(call, "arguments", call) for call in found] == written


def test_c1_c6_each_call_on_its_own_and_slips_with_one_meaning():
    slip = CALL.replace('"1+1"}}', "'1+1',}}")
    broken = '<tool_call>{"name": "calculator" "arguments": {}}</tool_call>'
    first, second, third = calls(f"Now {slip}{broken}{CALL}<|im_end|>")
    assert isinstance(first, ToolCall) and isinstance(third, ToolCall)
    assert first.arguments == third.arguments == {"expression": "1+1"}
    assert isinstance(second, ParseFailure) and "broken at character 23" in second.reason


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"<think>{CALL}</think>{CALL}", 1),
        (f"<think>{CALL}", 0),  # to the package, the call would end the thinking
        (f"<think>a</think>{CALL}<think>{CALL}</think>", 1),
        (f"Maybe {CALL}</think>{CALL}", 1),
        (CALL.replace("1+1", "<think>") + CALL, 2),
    ],
)
def test_c2_a_call_in_thinking_is_not_a_call(text, count):
    assert len(calls(text)) == count


def test_c2_the_prompt_may_have_opened_the_thinking():
    assert calls(f"Maybe {CALL}", prompt="<think>\n") == []
    assert len(calls(f"Maybe {CALL}</think>\n{CALL}", prompt="<think>\n")) == 1
    assert parse("84", prompt="<think>\n").thinking and not parse("84").thinking


def test_c3_an_unknown_tool_is_a_call_for_the_executor_to_refuse():
    text = "<tool_call>nothing\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>"
    (call,) = calls(text, family="glm-4.5")
    assert isinstance(call, ToolCall) and call.name == "nothing"


def test_c4_other_spellings_with_one_meaning_are_accepted_and_others_explained():
    (call,) = calls(CALL.replace('"arguments"', '"parameters"'))
    assert isinstance(call, ToolCall) and call.arguments == {"expression": "1+1"}
    (listed,) = calls('<tool_call>{"name": "calculator", "arguments": ["1+1"]}</tool_call>')
    assert isinstance(listed, ParseFailure) and "is a list" in listed.reason
    (nameless,) = calls('<tool_call>{"arguments": {}}</tool_call>')
    assert isinstance(nameless, ParseFailure) and "which tool" in nameless.reason


def test_c5_a_call_cut_by_the_token_limit_never_runs():
    for text, reason in (
        (CALL[:-12], "cut off by the token limit"),
        (CALL[:30], "cut off by the token limit"),
    ):
        (cut,) = calls(text, truncated=True)
        assert isinstance(cut, ParseFailure) and reason in cut.reason
    (unclosed,) = calls(CALL[:-12])
    assert isinstance(unclosed, ParseFailure) and "not closed" in unclosed.reason


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000])
def test_json_that_the_package_cannot_survive_is_a_failure(value):
    (failure,) = calls(f'<tool_call>{{"name": "calculator", "arguments": {{"x": {value}}}}}</tool_call>')
    assert isinstance(failure, ParseFailure) and failure.reason


def test_a_call_spelled_in_ordinary_tokens_is_text():
    spelled = tokenizer_of("qwen3").encode("<tool_call>", split_special_tokens=True)
    closed = tokenizer_of("qwen3").encode('{"name": "calculator"}</tool_call>', split_special_tokens=True)
    assert renderer_of("qwen3").parse([], spelled + closed, truncated=False).calls == ()


def test_a_parser_that_the_task_names_reads_the_text():
    task = make_task("hermes", parser=make_parser("hermes"), tools_in_prompt=False)
    renderer = make_renderer(tokenizer_of("qwen3"), task, "qwen3")
    assert str(renderer.syntax) == "call syntax hermes: chosen by the task"
    sampled = tokenizer_of("qwen3").encode(CALL, add_special_tokens=False)
    assert len(renderer.parse([], sampled, truncated=False).calls) == 1


def test_a_failed_result_says_error_as_everywhere():
    span = CallSpan("call_0", "calculator", Outcome.TIMEOUT, 0, 0, 0)
    result = ToolResult("call_0", "calculator", Outcome.TIMEOUT, "too slow", span)
    tokenizer, renderer = tokenizer_of("qwen3"), renderer_of("qwen3")
    prompt = renderer.prompt([ASK])
    sampled = tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False)
    assert "error: too slow" in tokenizer.decode(renderer.observation(prompt, sampled, [result]))


def test_a_format_whose_tokens_the_tokenizer_lacks_is_refused():
    with pytest.raises(RendererError, match="'qwen3' does not fit this tokenizer"):
        make_renderer(tiny_tokenizer(), make_task("hermes"), "qwen3")


@given(st.data())
def test_no_tokens_crash_a_family(data):
    for family in FAMILIES:
        vocabulary = len(tokenizer_of(family))
        control = sorted(tokenizer_of(family).get_added_vocab().values())
        token = st.sampled_from(control) | st.integers(0, vocabulary - 1)
        ids = data.draw(st.lists(token, max_size=20))
        parsed = renderer_of(family).parse([], ids, truncated=data.draw(st.booleans()))
        ends = [0, *(call.position[1] for call in parsed.calls)]
        assert all(end <= call.position[0] for end, call in zip(ends, parsed.calls, strict=False))
