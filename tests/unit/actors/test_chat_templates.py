"""Choosing the parser, and what stands around results, on real chat templates (those that TRL keeps) and on
short ones of families that TRL has none of, written after their documented formats."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from actors.renderer import RendererError, make_renderer
from tests.tiny import CHATML, tiny_tokenizer
from tests.unit.actors.support import calculator, make_task
from toolcall import schema_tool
from toolcall.parsers import make_parser
from toolcall.types import CallSpan, Outcome, ToolCall, ToolResult

CONTROL = re.compile(r"<\|[\w▁]+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]{3,}\]|</?(?:tool_call|tool_response|think)>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|eot|>", "</s>")

HEADED = """{%- macro turn(role, text) -%}<|header_start|>{{ role }}<|header_end|>

{{ text }}<|eot|>{%- endmacro -%}
{%- if tools %}{{ turn("system", tools | tojson) }}{% endif -%}
{%- for m in messages %}
{%- if m.tool_calls %}{{ turn("assistant", CALLS) }}
{%- elif m.role == "tool" %}{{ turn("ipython", m.content | tojson) }}
{%- else %}{{ turn(m.role, m.content) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
LLAMA4_PYTHONIC = """{%- macro calls(m) -%}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for key, value in c.function.arguments.items() -%}
{{ key }}="{{ value }}"{{ ", " if not loop.last }}{% endfor -%}
){{ ", " if not loop.last }}{% endfor %}]{%- endmacro -%}""" + HEADED.replace("CALLS", "calls(m)")
MISTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if loop.index0 == 0 and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{{- ", " if not loop.last }}{% endfor %}]{{ eos_token }}
{%- elif m.role == "assistant" %}
{%- if loop.index0 and messages[loop.index0 - 1].role not in ("user", "tool") %}
{{- raise_exception("roles must alternate") }}{% endif %}{{ m.content }}{{ eos_token }}
{%- elif m.role == "tool" -%}
[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""
MISTRAL_NAMED = re.sub(
    r"\[TOOL_CALLS\]\[.*?\{% endfor %\}\]",
    "{% for c in m.tool_calls %}{% set f = c.function -%}"
    "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    MISTRAL,
    flags=re.DOTALL,
)
DEEPSEEK_V31 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ c.function.name + "<｜tool▁sep｜>" + c.function.arguments }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == "assistant" %}{{ m.content }}<｜end▁of▁sentence｜>
{%- elif m.role == "tool" %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- endif %}
{%- endfor %}"""


def real(name: str) -> str:
    """A template from TRL's collection, read without importing TRL."""
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "install requirements/dev.txt"
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_for(template: str) -> Any:
    """The tiny tokenizer with the template's control tokens as special tokens."""
    tokenizer = tiny_tokenizer(template)
    control = sorted(set(CONTROL.findall(template)) | set(re.findall(r"\[[A-Z_]+\]", template)))
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": control,
            "eos_token": next((end for end in ENDS if end in template), "</s>"),
            "bos_token": "<|endoftext|>",
        }
    )
    return tokenizer


def task(**changes: Any) -> Any:
    return make_task("hermes", **({"parser": None, "tools_in_prompt": False} | changes))


def result(text: str, call_id: str = "abc123xyz") -> ToolResult:
    span = CallSpan(call_id, "calculator", Outcome.OK, 0, 0, 0)
    return ToolResult(call_id, "calculator", Outcome.OK, text, span)


def rendered(template: str, made: Any, messages: list[dict[str, Any]]) -> str:
    renderer: Any = make_renderer(tokenizer_for(template), made, "template")
    return renderer.template(messages)


def observed(template: str, *results: ToolResult) -> str:
    tokenizer = tokenizer_for(template)
    renderer = make_renderer(tokenizer, task(), "template")
    return tokenizer.decode(renderer.observation([5], [5], results or [result('say "é"')]))


CHOSEN = [
    (real("qwen2_5"), "hermes"),
    (real("qwen3_instruct_2507"), "hermes"),
    (real("qwen3_vl"), "hermes"),
    (real("qwen3_5_nothink"), "qwen3_coder"),
    (real("qwen3_6"), "qwen3_coder"),
    (real("llama3_1"), "llama3_json"),
    (real("llama3_2"), "llama3_json"),
    (real("lfm2_v2"), "pythonic"),
    (LLAMA4_PYTHONIC, "pythonic"),
    (MISTRAL, "mistral"),
    (MISTRAL_NAMED, "mistral"),
    (DEEPSEEK_V31, "deepseek"),
]


@pytest.mark.parametrize(("template", "parser"), CHOSEN)
def test_auto_takes_the_parser_that_reads_the_templates_own_call_and_says_so(template, parser):
    tokenizer = tokenizer_for(template)
    renderer = make_renderer(tokenizer, task(), "template")
    assert str(renderer.syntax) == (
        f"call syntax {parser}: chosen since it reads back the call that the chat template writes"
    )
    prompt = renderer.prompt([{"role": "user", "content": "Q"}])
    assert tokenizer.decode(prompt).count("calculator") == 1  # offered once, by the template


@pytest.mark.parametrize(("template", "parser"), CHOSEN)
def test_a_row_with_tools_of_its_own_is_shown_those_alone(template, parser):
    tokenizer = tokenizer_for(template)
    renderer = make_renderer(tokenizer, task(), "template")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    rows = renderer.offering([schema_tool("weather", "W", parameters, no_call)])
    prompt = rows.prompt([{"role": "user", "content": "Q"}])
    assert tokenizer.decode(prompt).count("weather") == 1
    assert "calculator" not in tokenizer.decode(prompt)
    turn = make_parser(parser).render_calls([ToolCall("", "weather", {"city": "Oslo"})])
    sampled = tokenizer.encode(f"</think>{turn}{tokenizer.eos_token}", add_special_tokens=False)
    (found,) = rows.parse(prompt, sampled, truncated=False).calls
    assert isinstance(found, ToolCall) and found.arguments == {"city": "Oslo"}
    assert "calculator" in tokenizer.decode(renderer.prompt([{"role": "user", "content": "Q"}]))


async def no_call(arguments, context):
    raise AssertionError("not called")


@pytest.mark.parametrize(("template", "parser"), CHOSEN)
def test_a_sampled_turn_is_parsed_with_its_control_tokens(template, parser):
    tokenizer = tokenizer_for(template)
    renderer = make_renderer(tokenizer, task(), "template")
    call = ToolCall("", "calculator", {"expression": "1+1"})
    turn = make_parser(parser).render_calls([call])
    sampled = tokenizer.encode(f"{turn}{tokenizer.eos_token}", add_special_tokens=False)
    thinks = template == real("qwen3_6")  # its header opens a thinking section
    prompt = renderer.prompt([{"role": "user", "content": "Q"}])
    assert len(renderer.parse(prompt, sampled, truncated=False).calls) == (0 if thinks else 1)
    sampled = tokenizer.encode("</think>", add_special_tokens=False) + sampled
    (found,) = renderer.parse(prompt, sampled, truncated=False).calls
    assert isinstance(found, ToolCall)
    assert (found.name, found.arguments) == ("calculator", {"expression": "1+1"})
    assert tokenizer.eos_token not in renderer.text(sampled)


@pytest.mark.parametrize(
    ("template", "around"),
    [
        (real("qwen2_5"), '<tool_response>\nsay "é"\n</tool_response>'),
        (real("qwen3_5_nothink"), '<tool_response>\nsay "é"\n</tool_response>'),
        (real("llama3_1"), '"say \\"é\\""<|eot_id|>'),
        (real("lfm2_v2"), '<|tool_response_start|>say "é"<|tool_response_end|>'),
        (MISTRAL, '[TOOL_RESULTS]{"content": "say \\"é\\"", "call_id": "abc123xyz"}[/TOOL_RESULTS]'),
        (DEEPSEEK_V31, '<｜tool▁output▁begin｜>say "é"<｜tool▁output▁end｜>'),
    ],
)
def test_results_stand_in_what_the_template_writes_around_them_once(template, around):
    text = observed(template)
    assert around in text and text.count("tool_response>") in (0, 2)


def test_results_are_wrapped_where_the_template_does_not():
    assert "<|im_start|>tool\n<tool_response>\n84\n</tool_response><|im_end|>" in observed(
        CHATML, result("84")
    )


def test_every_result_carries_its_own_calls_id():
    text = observed(MISTRAL, result("1", "abc123xyz"), result("2", "def456uvw"))
    assert re.findall(r'"content": "(\d)", "call_id": "(\w+)"', text) == [
        ("1", "abc123xyz"),
        ("2", "def456uvw"),
    ]


def test_a_template_for_one_call_a_turn_still_shows_two_results():
    assert observed(real("llama3_1"), result("1"), result("2")).count("ipython<|end_header_id|>") == 2


def test_either_end_of_a_llama_turn_is_kept_and_not_doubled():
    template = real("llama3_1")
    tokenizer = tokenizer_for(template)
    renderer = make_renderer(tokenizer, task(), "template")
    for end in ("<|eot_id|>", "<|eom_id|>"):
        sampled = tokenizer.encode(end)
        assert sampled[-1] in renderer.stop_token_ids
        assert tokenizer.decode(renderer.observation([5], sampled, [result("84")])).startswith(
            "<|start_header"
        )


@pytest.mark.parametrize("syntax", ["tag", "hermes"])
def test_a_turn_ends_at_the_templates_own_token_and_never_at_a_line_break(syntax):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # as base models with a chat template have it
    ends = make_renderer(tokenizer, make_task(syntax)).stop_token_ids
    assert tokenizer.decode(ends) == "<|im_end|><|endoftext|>"
    plain = tiny_tokenizer(CHATML.replace("+ '<|im_end|>' ", ""))
    assert plain.decode(make_renderer(plain, make_task(syntax)).stop_token_ids) == "<|im_end|>"  # its eos


FUNCTION = {"name": "calculator", "arguments": {"expression": "1+1"}}
EXAMPLE = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abc123xyz",
                "type": "function",
                "function": {"name": "calculator", "arguments": {"expression": "1+1"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abc123xyz", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "2+2?"},
]


@pytest.mark.parametrize(("template", "parser"), CHOSEN)
def test_a_worked_example_is_shown_in_the_syntax_that_is_parsed(template, parser):
    text = rendered(template, task(), EXAMPLE).partition("1+1?")[2]
    calls = make_parser(parser).parse(text).calls
    assert [getattr(call, "arguments", call) for call in calls] == [{"expression": "1+1"}]
    assert text.count("tool_response>") in (0, 2)


def test_a_worked_example_where_the_template_knows_no_calls_is_text():
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    assert (
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        in rendered(CHATML, task(), EXAMPLE)
    )


def test_a_worked_example_of_an_inline_syntax_is_one_turn():
    text = rendered(CHATML, make_task("tag", tools_in_prompt=False), EXAMPLE)
    assert "assistant\n<calc>1+1</calc>\n<result>2</result>\nIt is 2.<|im_end|>" in text
    assert "<calc>expression</calc>: Evaluate arithmetic." in text  # offered, since the prompt does not


@pytest.mark.parametrize(
    ("template", "changes", "says"),
    [
        (real("glm4moe"), {}, "no parser reads the calls of this chat template, such as .*arg_key"),
        (real("llama3_1"), {"parser": make_parser("hermes")}, "'hermes', but .* as 'llama3_json'"),
        (real("lfm2"), {}, "does not show how a call of one is written; name the syntax with task.parser"),
        (real("gemma3"), {}, "refuses a conversation with tools: Conversation roles must alternate"),
        (real("qwen3"), {}, "rewrites earlier turns"),
        (real("deepseekv3"), {}, "rewrites earlier turns"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_mend(template, changes, says):
    with pytest.raises(RendererError, match=says):
        make_renderer(tokenizer_for(template), task(**changes), "template")


def test_a_parser_of_ones_own_stays_where_the_prompt_teaches_it():
    made = task(parser=make_parser("hermes"), tools_in_prompt=True)
    renderer = make_renderer(tokenizer_for(real("llama3_1")), made, "template")
    assert str(renderer.syntax) == "call syntax hermes: chosen by the task"


@pytest.mark.parametrize("text", ["<tool_call>", "a </think> b", "<think><|im_end|></think>"])
def test_t7_tool_text_becomes_no_token_that_is_merely_added_either(text):
    tokenizer = tokenizer_for(real("qwen2_5"))
    tokenizer.add_tokens(["<tool_call>", "</tool_response>", "<think>", "</think>"])
    renderer = make_renderer(tokenizer, task(), "template")
    control = set(tokenizer.get_added_vocab().values())
    plain, evil = (renderer.observation([5], [5], [result(t)]) for t in ("84", text))
    assert [id for id in evil if id in control] == [id for id in plain if id in control]
    assert tokenizer.decode(evil).replace("\u200b", "").count(text) == 1


def test_white_space_that_a_tokenizer_added_stays_as_it_is():
    tokenizer = tokenizer_for(real("qwen2_5"))
    tokenizer.add_tokens(["    "])
    renderer = make_renderer(tokenizer, task(tools=[calculator]), "template")
    assert "if x:\n    y" in tokenizer.decode(renderer.observation([5], [5], [result("if x:\n    y")]))
