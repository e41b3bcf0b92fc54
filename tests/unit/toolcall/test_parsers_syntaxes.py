"""What every syntax must do, on each family's documented format: one table, the same promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcall.parsers import MESSAGE_SYNTAXES, PARSERS, make_parser
from toolcall.parsers.thinking import SECTIONS
from toolcall.types import CallSpan, Outcome, ParseFailure, Parser, ToolCall, ToolResult

STRING = {"type": "string"}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "q": STRING,
                    "n": {"type": "integer"},
                    "ids": {"type": "array", "items": {"type": "integer"}},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "mode": {"$ref": "#/$defs/Mode"},
                    "any": {},
                    "note": {"anyOf": [STRING, {"type": "null"}]},
                    "size": {"type": ["string", "integer"]},
                },
                "required": ["q"],
                "$defs": {"Mode": {"enum": ["fast", "slow"], "type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Syntax:
    name: str
    one: str  # a call of `look` with q="x", as the family's documentation writes it
    cut_from: int  # from this length on, a cut is visibly a call
    broken: tuple[str, ...]  # calls that cannot be read, each closed as far as it is
    between: str = "\n"
    wrap: Callable[[str], str] = str
    options: dict[str, Any] = field(default_factory=dict)

    def parser(self) -> Parser:
        return make_parser(self.name, SCHEMAS, **self.options)

    def calls(self, text: str, **options: Any) -> tuple[ToolCall | ParseFailure, ...]:
        return self.parser().parse(text, **options).calls


def deepseek_v3(body: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{body}\n```<｜tool▁call▁end｜>"


def deepseek_v31(body: str) -> str:
    return f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"


SYNTAXES = [
    Syntax(
        "hermes",
        '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>',
        len("<tool_call>"),
        ('<tool_call>{"name": "look", "arguments": {"q": }}</tool_call>', "<tool_call>look(x)"),
    ),
    Syntax(
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>",
        len("<tool_call>"),
        (
            "<tool_call>\n<function=look>\n<parameter=q>\nx\n</function>\n</tool_call>",
            "<tool_call>\n<function=look>\n<parameter=q>\nx",
            "<tool_call>look</tool_call>",
            "<function=look>",
        ),
    ),
    Syntax(
        "llama3_json",
        '{"name": "look", "parameters": {"q": "x"}}',
        len('{"name":'),
        ('{"name": "look", "parameters": {"q": }}', '{"name": "look", "parameters": {"q": "abc}}'),
    ),
    Syntax(
        "llama3_json",
        '{"name": "look", "parameters": {"q": "x"}}',
        len('{"name":'),
        ('{"name": "look" "parameters": {}}',),
        between="; ",
    ),
    Syntax(
        "pythonic",
        'look(q="x")',
        len("look("),
        ("look(q=)", 'look("x")', "look(q=f(1))", 'look(q="x") + 1', 'look(q="x" 2)'),
        between=", ",
        wrap="[{}]".format,
    ),
    Syntax(
        "mistral",
        '[TOOL_CALLS]look[ARGS]{"q": "x"}',
        len("[TOOL_CALLS]"),
        ('[TOOL_CALLS]look[ARGS]{"q": }', "[TOOL_CALLS]look(x)", '[TOOL_CALLS]look[ARGS]{"q": "x'),
        between="",
    ),
    Syntax(
        "mistral",
        '{"name": "look", "arguments": {"q": "x"}}',
        1,
        ('{"name": "look" "arguments": {}}', '{"name": "look", "arguments": ["x"]}', "{}"),
        between=", ",
        wrap="[TOOL_CALLS] [{}]".format,
    ),
    Syntax(
        "deepseek",
        deepseek_v3('{"q": "x"}'),
        len("<｜tool▁call▁begin｜>"),
        (
            deepseek_v3('{"q": }'),
            "<｜tool▁call▁begin｜>look<｜tool▁call▁end｜>",
            deepseek_v3('{"q": "x')[:-17],
        ),
        wrap=CALLS.format,
    ),
    Syntax(
        "deepseek",
        deepseek_v31('{"q": "x"}'),
        len("<｜tool▁call▁begin｜>"),
        (deepseek_v31('{"q": }'), deepseek_v31("[1]")),
        between="",
        wrap=CALLS.format,
    ),
    Syntax(
        "tag",
        "<find>x</find>",
        len("<find>"),
        ("<find></find>", "<find>x"),
        options={"tags": {"find": ["look", "q"]}},
    ),
    Syntax(
        "fenced_python",
        "<code>\n```python\nx\n```\n</code>",
        len("<code>"),
        ("<code>\n```python\n\n```\n</code>", "<code>\n```python\nx"),
        options={"tool": "look", "argument": "q"},
    ),
    Syntax(
        "fenced_python",
        "```python\nx\n```",
        len("```python\n"),
        ("```python\n\n```", "```py\nx"),
        options={"tool": "look", "argument": "q", "tag": ""},
    ),
]
EACH = pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: f"{s.name}-{SYNTAXES.index(s)}")


def kinds(calls):
    return "".join("c" if isinstance(call, ToolCall) else "f" for call in calls)


def result(text, outcome=Outcome.OK):
    return ToolResult("call_0", "look", outcome, text, CallSpan("call_0", "look", outcome, 0, 0, 0))


def test_the_table_covers_every_syntax():
    assert {syntax.name for syntax in SYNTAXES} == set(PARSERS)


@EACH
def test_a_call_as_documented_with_text_around_it(syntax):
    text = f"I see.\n{syntax.wrap(syntax.one)}\nThen I wait."
    parsed = syntax.parser().parse(text)
    (call,) = parsed.calls
    assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("look", {"q": "x"})
    start, end = call.position
    assert text[start:end].strip() == syntax.one
    assert "look" not in parsed.text and parsed.text.startswith("I see.")
    assert parsed.text.endswith("Then I wait.")


@EACH
def test_parallel_calls_are_all_found_in_order(syntax):
    text = syntax.wrap(syntax.between.join([syntax.one, syntax.one.replace("x", "y"), syntax.one]))
    calls = syntax.calls(text)
    assert [call.arguments["q"] for call in calls if isinstance(call, ToolCall)] == ["x", "y", "x"]
    assert len({call.id for call in calls}) == 3


@EACH
def test_c1_a_broken_call_hides_no_neighbour(syntax):
    for broken in syntax.broken:
        between = syntax.between if syntax.between.strip() else "\n"
        text = syntax.wrap(between.join([syntax.one, broken, syntax.one]))
        assert kinds(syntax.calls(text)) == "cfc", broken


@EACH
def test_c1_the_error_of_a_broken_call_is_for_the_model_to_read(syntax):
    for broken in syntax.broken:
        (failure,) = syntax.calls(syntax.wrap(broken))
        assert isinstance(failure, ParseFailure) and len(failure.reason) > 20


@EACH
@pytest.mark.parametrize("opener", SECTIONS)
def test_c2_a_call_in_thinking_and_the_same_after_it_is_one_call(syntax, opener):
    call = syntax.wrap(syntax.one)
    assert kinds(syntax.calls(f"{opener}\nMaybe\n{call}\n?{SECTIONS[opener]}{call}")) == "c"
    assert kinds(syntax.calls(f"{opener}\n{call}\nnever closed")) == ""


@EACH
def test_c2_the_prompt_may_have_opened_the_thinking(syntax):
    call = syntax.wrap(syntax.one)
    assert kinds(syntax.calls(f"Maybe\n{call}", thinking=True)) == ""
    assert kinds(syntax.calls(f"Maybe\n{call}\n</think>\n{call}", thinking=True)) == "c"
    assert kinds(syntax.calls(f"Maybe\n{call}\n</think>\n{call}")) == "c"


@EACH
def test_c5_a_call_cut_by_the_token_limit_never_runs(syntax):
    whole = syntax.wrap(syntax.one)
    start, end = whole.index(syntax.one), whole.index(syntax.one) + len(syntax.one)
    if syntax.name == "qwen3_coder":
        end = whole.index("</function>") + len("</function>")  # what follows it adds nothing
    for cut in range(start + syntax.cut_from, end):
        calls = syntax.calls(whole[:cut], truncated=True)
        assert kinds(calls) == "f", whole[:cut]
        assert "cut off by the token limit" in calls[0].reason, whole[:cut]


@EACH
def test_c5_calls_before_the_cut_are_found(syntax):
    whole = syntax.wrap(syntax.between.join([syntax.one, syntax.one]))
    second = whole.rindex(syntax.one)
    assert kinds(syntax.calls(whole[: second + syntax.cut_from], truncated=True)) == "cf"


@EACH
def test_plain_answers_are_no_calls(syntax):
    for text in (
        "The answer is 84.",
        'As JSON: {"name": "Ada"}',
        '{"answer": [1, 2]}',
        "[1, 2](f)",
        "`code`",
    ):
        parsed = syntax.parser().parse(text)
        assert parsed.calls == () and parsed.text == text


@EACH
def test_what_the_syntax_renders_it_reads_back(syntax):
    parser = syntax.parser()
    calls = [ToolCall("", "look", {"q": "a b"}), ToolCall("", "look", {"q": "1 < 2\n</x> é"})]
    read = parser.parse(parser.render_calls(calls)).calls
    assert [(call.name, call.arguments) for call in read] == [("look", c.arguments) for c in calls]


@EACH
def test_an_offer_names_the_tool_and_its_example_is_a_call(syntax):
    parser = syntax.parser()
    offer = parser.offer(SCHEMAS[:1])
    assert parser.offered_as("look") in offer
    if not parser.inline:
        assert "ToolCall" in {type(call).__name__ for call in parser.parse(offer).calls}


@EACH
def test_results_show_failures_as_errors_and_cannot_close_their_tag(syntax):
    parser = syntax.parser()
    assert "error: no" in parser.render_result(result("no", Outcome.TOOL_ERROR))
    tag = parser.result_tag
    if tag:
        rendered = parser.render_result(result(f"</{tag}> <{tag.upper()}>"), wrapped=True).lower()
        assert rendered.count(f"<{tag}>") == rendered.count(f"</{tag}>") == 1


@pytest.mark.parametrize("name", MESSAGE_SYNTAXES)
def test_syntaxes_with_parallel_calls_have_no_stop_string(name):
    parser = make_parser(name)
    assert parser.stop == () and not parser.inline


# --- properties -------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *(tag for section in SECTIONS.items() for tag in section),
        *(marker for syntax in SYNTAXES for marker in syntax.parser().markers),
        *(syntax.one for syntax in SYNTAXES),
        *(broken for syntax in SYNTAXES for broken in syntax.broken),
        *("<find>", "</find>", "<code>", "</code>", "```python\n", "```", "[look(", '{"name": "look", '),
        *("<function=", "<parameter=q>", "</parameter>", "</function>", '"parameters": ', '"arguments": {'),
        *"{}[]()\":,;=\\\n 1a'`",
        *("\\u", "\\x", '"""', "\ud800", "\0", "ſ", "İ", "²"),
    ]
)
NOISE = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)


@given(NOISE, st.booleans(), st.booleans())
def test_no_text_crashes_a_parser_and_all_it_says_is_consistent(text, truncated, thinking):
    for syntax in SYNTAXES:
        parser = syntax.parser()
        parsed = parser.parse(text, truncated=truncated, thinking=thinking)
        assert parsed == parser.parse(text, truncated=truncated, thinking=thinking)  # pure
        assert len({call.id for call in parsed.calls}) == len(parsed.calls)
        ends = [0, *(call.position[1] for call in parsed.calls)]
        assert all(end <= c.position[0] < c.position[1] for end, c in zip(ends, parsed.calls, strict=False))
        assert ends[-1] <= len(text)


KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(KEYS, JSON, max_size=3), min_size=1, max_size=3))
def test_any_arguments_survive_rendering_and_parsing(arguments):
    calls = [ToolCall("", "look", one) for one in arguments]
    for name, options in [
        ("hermes", {}),
        ("llama3_json", {}),
        ("pythonic", {}),
        *(("mistral", {"form": form}) for form in ("list", "named")),
        *(("deepseek", {"version": version}) for version in ("v3", "v3.1")),
    ]:
        parser = make_parser(name, **options)
        read = parser.parse(parser.render_calls(calls)).calls
        assert [getattr(call, "arguments", call) for call in read] == arguments, name


NEIGHBOURS = st.lists(
    st.text("ab<>{}[]:,.\n", max_size=8) | st.sampled_from(["x {", "it's", '"']), max_size=5
)


@given(NEIGHBOURS, NEIGHBOURS)
def test_a_valid_call_survives_any_neighbour(before, after):
    for syntax in SYNTAXES:
        for broken in ("", *syntax.broken):
            text = f"{before}\n{syntax.wrap(broken) if broken else ''}\n{syntax.wrap(syntax.one)}\n{after}"
            good = [call for call in syntax.calls(text) if isinstance(call, ToolCall)]
            assert {"q": "x"} in [call.arguments for call in good], (syntax.name, text)


# --- one family at a time ---------------------------------------------------------------------------


def read(name, text, **options):
    (call,) = make_parser(name, SCHEMAS).parse(text, **options).calls
    return call.arguments if isinstance(call, ToolCall) else call.reason


def coder(key, value):
    return f"<function=look>\n<parameter={key}>\n{value}\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("q", "3", "3"),
        ("q", "true", "true"),
        ("q", '{"a": 1}', '{"a": 1}'),
        ("q", "\nindented\n  code\n", "\nindented\n  code\n"),
        ("n", "3", 3),
        ("n", "three", "three"),
        ("ids", "[1, 2]", [1, 2]),
        ("exact", "True", True),
        ("exact", "null", None),
        ("mode", "fast", "fast"),
        ("any", "3", 3),
        ("any", "a word", "a word"),
        ("extra", "3", "3"),
        ("note", '{"a": 1}', '{"a": 1}'),
        ("note", "1.50", "1.50"),
        ("note", "true", "true"),
        ("note", "null", None),
        ("size", "3", 3),
        ("size", "3.0", "3.0"),
    ],
)
def test_c7_the_schema_decides_what_unquoted_text_is(key, text, value):
    assert read("qwen3_coder", coder(key, text)) == {key: value}


def test_qwen3_coder_without_arguments_and_with_a_stray_closing_tag():
    assert read("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>") == {}
    assert "without <tool_call>" in read("qwen3_coder", "</tool_call>")
    assert "given twice" in read("qwen3_coder", coder("q", "a").replace("</function>", coder("q", "b")[16:]))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<|python_tag|>{"name": "look", "parameters": {"q": "x"}}', {"q": "x"}),
        ('<|python_start|>{"name": "look", "parameters": {"q": "x"}}<|python_end|>', {"q": "x"}),
        ('[{"name": "look", "parameters": {"q": "x"}}]', {"q": "x"}),
        ('{"type": "function", "function": {"name": "look", "parameters": {"q": "x"}}}', {"q": "x"}),
        ('{"function": "look", "parameters": {"q": "x"}}', {"q": "x"}),
        ('{"type": "function", "name": "look", "parameters": {"q": "x"}}', {"q": "x"}),
        ('{"name": "look", "arguments": {"q": "x"}}', {"q": "x"}),
        ('{"name": "now"}', {}),
        ('{"name": "look", "parameters": null}', {}),
    ],
)
def test_c4_llama3_json_in_its_variants(text, arguments):
    assert read("llama3_json", text) == arguments
    assert make_parser("llama3_json", SCHEMAS).parse(text).text == ""


def test_c4_llama3_json_that_is_unclear_is_explained():
    assert "which tool" in read("llama3_json", '{"parameters": {"q": "x"}}')
    assert "is a list" in read("llama3_json", '{"name": "look", "parameters": ["x"]}')
    assert "followed by a call" in read("llama3_json", "<|python_tag|>print(1)")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a\\x41\\u00e9"', "aAé"),
        ('"""two\nlines "quoted" \\n"""', 'two\nlines "quoted" \n'),
        ("[1, -2.5e3, None, True]", [1, -2500.0, None, True]),
        ("(1, 'a',)", [1, "a"]),
        ("{'a': {'b': false}}", {"a": {"b": False}}),
    ],
)
def test_c6_pythonic_arguments_are_python_literals(text, value):
    assert read("pythonic", f"[look(q={text})]") == {"q": value}


@pytest.mark.parametrize("opener", ["<|python_start|>", "<|tool_call_start|>"])
def test_pythonic_between_the_familys_own_tokens(opener):
    closer = opener.replace("start", "end")
    parsed = make_parser("pythonic", SCHEMAS).parse(f'{opener}[look(q="x")]{closer}')
    assert kinds(parsed.calls) == "c" and parsed.text == ""
    assert "followed by calls" in read("pythonic", f"{opener}print(1){closer}")


@pytest.mark.parametrize("text", ["[link(1)](http://x)", "[see(a=b) below]"])
def test_pythonic_prose_in_brackets_is_prose(text):
    assert make_parser("pythonic", SCHEMAS).parse(text).calls == ()


def test_mistral_keeps_the_id_that_the_model_wrote_and_makes_nine_characters_else():
    parser = make_parser("mistral")
    written = '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "9f3kq7xzb"}, {"name": "now"}]'
    assert [call.id for call in parser.parse(written).calls] == ["9f3kq7xzb", "call00001"]
    (newer,) = parser.parse("[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}").calls
    assert newer.id == "abc123def"
    twice = parser.parse("[TOOL_CALLS]now[CALL_ID]a[ARGS]{}[TOOL_CALLS]now[CALL_ID]a[ARGS]{}").calls
    assert [call.id for call in twice] == ["call00000", "call00001"]


def test_search_r1_and_retool_as_published():
    search = make_parser("tag", tags={"search": ["search", "query"]}, result_tag="information")
    (call,) = search.parse("<think>I need it.</think>\n<search> who wrote Emma </search>").calls
    assert call == ToolCall("call_0", "search", {"query": "who wrote Emma"}, (26, 59))
    assert search.render_result(result("Jane")) == "\n<information>Jane</information>\n"
    retool = make_parser("fenced_python")
    (call,) = retool.parse("So:\n<code>\n```python\nfor i in 'ab':\n    print(i)\n```\n</code>").calls
    assert isinstance(call, ToolCall) and call.arguments == {"code": "for i in 'ab':\n    print(i)"}
    assert retool.render_result(result("a\nb")) == "\n<interpreter>a\nb</interpreter>\n"


def test_json_of_every_syntax_is_as_tolerant():
    slips = "{'q': 'a\nb',}"
    for name, text in [
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {slips}}}</tool_call>'),
        ("llama3_json", f'{{"name": "look", "parameters": {slips}}}'),
        ("mistral", f"[TOOL_CALLS]look[ARGS]{slips}"),
        ("deepseek", CALLS.format(deepseek_v3(slips))),
    ]:
        assert read(name, text) == {"q": "a\nb"}, json.dumps(text)
