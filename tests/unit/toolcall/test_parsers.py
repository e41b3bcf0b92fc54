"""Both call syntaxes: what is a call, what is a failure and what its reason says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcall.parsers import make_parser
from toolcall.parsers.thinking import MAX_CALLS
from toolcall.types import CallSpan, Outcome, ParseFailure, ToolCall, ToolResult

HERMES = make_parser("hermes")
TAG = make_parser("tag", tags={"calc": ("calculator", "expression"), "search": ("search", "query")})


def call(arguments='{"q": "x"}', name="look"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def arguments(text, **options):
    """The arguments of the one call in `text`."""
    (found,) = HERMES.parse(text, **options).calls
    assert isinstance(found, ToolCall), found
    return found.arguments


def reason(text, parser=HERMES, **options):
    (found,) = parser.parse(text, **options).calls
    assert isinstance(found, ParseFailure), found
    return found.reason


def result(text, outcome=Outcome.OK):
    return ToolResult("call_0", "look", outcome, text, CallSpan("call_0", "look", outcome, 0, 0, 0))


# --- hermes -----------------------------------------------------------------------------------------


def test_a_call_with_text_around_it():
    text = f"I look.\n{call()}\nThen I wait."
    parsed = HERMES.parse(text)
    assert parsed.calls == (ToolCall("call_0", "look", {"q": "x"}, (8, len(text) - 13)),)
    assert parsed.text == "I look.\n\nThen I wait."


def test_no_call_is_no_call():
    assert HERMES.parse("The answer is {84}.").calls == ()


def test_c1_a_broken_call_does_not_hide_the_next():
    bad, good = HERMES.parse('<tool_call>{"name": "look" "arguments": {}}</tool_call>' + call()).calls
    assert isinstance(bad, ParseFailure) and isinstance(good, ToolCall)
    assert (bad.id, good.id) == ("call_0", "call_1")
    assert "broken at character 17" in bad.reason and '"arguments"' in bad.reason


@pytest.mark.parametrize(
    "broken",
    [
        '{"name": "look", "arguments": {"q": "abc}}',  # the open string runs into the next call
        '{"name": "look", "arguments": {"q": "x"}',
        "look(x)",
        "",
        '{"name": "look", "arguments": {"q": "x"}}}',
        '[{"name": "look", "arguments": {}}]',
        '{"arguments": {}}',
    ],
)
@pytest.mark.parametrize("closing", ["</tool_call>", ""])
def test_c1_whatever_is_wrong_with_a_call_the_next_runs(broken, closing):
    calls = HERMES.parse(f"<tool_call>{broken}{closing}\n{call()}").calls
    assert [type(c) for c in calls] == [ParseFailure, ToolCall]


def test_c11_a_turn_that_repeats_itself_holds_a_bounded_number_of_calls():
    repeated = call() * (MAX_CALLS + 100)
    *calls, last = HERMES.parse(f"A {repeated} B").calls
    assert len(calls) == MAX_CALLS and all(isinstance(c, ToolCall) for c in calls)
    assert (
        isinstance(last, ParseFailure) and "128 calls; this one and those after it did not run" in last.reason
    )
    assert len(HERMES.parse(call() * MAX_CALLS).calls) == MAX_CALLS
    assert len(HERMES.parse(f"{repeated}</think>{call()}").calls) == 1  # the template opened the section


def test_c2_a_call_in_thinking_is_not_a_call():
    assert len(HERMES.parse(f"<think>Maybe {call()}?</think>\n{call()}").calls) == 1


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>{call()}", 0),  # never closed
        (f"Maybe {call()}</think>{call()}", 1),  # the template opened it
        (f"<think>a</think>{call()}</think>", 1),  # a stray closer after a whole section
        (f"<think>{call()}</think><think>{call()}</think>{call()}{call()}", 2),
        (call('{"q": "<think>"}') + call(), 2),  # a tag inside a string is text
        ('<tool_call>{"name": <think>' + call() + "</think>" + call(), 2),  # one broken, one good
    ],
)
def test_c2_thinking_in_all_its_forms(text, calls):
    assert len(HERMES.parse(text).calls) == calls


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "parameters": {"q": "x"}}',
        '{"arguments": {"q": "x"}, "name": "look", "id": "7", "type": "function"}',
        '{"name": "look", "arguments": "{\\"q\\": \\"x\\"}"}',
    ],
)
def test_c4_other_spellings_with_one_meaning_are_accepted(body):
    assert arguments(f"<tool_call>{body}</tool_call>") == {"q": "x"}


@pytest.mark.parametrize("body", ['{"name": "now"}', '{"name": "now", "arguments": null}'])
def test_c4_missing_or_null_arguments_mean_none(body):
    assert arguments(f"<tool_call>{body}</tool_call>") == {}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "look", "arguments": ["x"]}', "is a list"),
        ('{"name": "look", "arguments": "x"}', "a string that holds broken JSON"),
        ('{"name": "look", "arguments": "{} {}"}', "more than JSON"),
        ('{"name": "look", "arguments": 3}', "is a number"),
        ('{"name": "look", "q": "x"}', "put 'q' under \"arguments\""),
        ('{"name": "look", "arguments": {}, "parameters": {}}', "both"),
        ('{"name": 3, "arguments": {}}', "which tool"),
        ('{"function": "look"}', "which tool"),
        ('[{"name": "look"}]', "one JSON object"),
        ("null", "but is null"),
    ],
)
def test_c4_what_is_unclear_is_explained(body, says):
    assert says in reason(f"<tool_call>{body}</tool_call>")


@pytest.mark.parametrize("cut", range(12, len(call('{"q": "abc"}')) - 1))
def test_c5_a_call_cut_by_the_token_limit_never_runs(cut):
    text = call('{"q": "abc"}')[:cut]
    assert "cut off by the token limit" in reason(text, truncated=True)


def test_c5_calls_before_the_cut_run():
    calls = HERMES.parse(call() + call()[:30], truncated=True).calls
    assert [type(c) for c in calls] == [ToolCall, ParseFailure]


def test_a_whole_call_whose_tag_is_not_closed_at_the_turns_end_runs():
    assert arguments('<tool_call>{"name": "look", "arguments": {"q": "x"}}\n') == {"q": "x"}


def test_a_closing_tag_alone_is_explained():
    assert "without <tool_call>" in reason('{"name": "look"}</tool_call>')


@pytest.mark.parametrize(
    ("given_arguments", "value"),
    [
        ('{"q": "x",}', {"q": "x"}),
        ('{"q": ["a", "b",],}', {"q": ["a", "b"]}),
        ('{"q": "a\nb\tc"}', {"q": "a\nb\tc"}),
        ("{'q': 'a \"b\" c'}", {"q": 'a "b" c'}),
        (r"{'q': 'it\'s'}", {"q": "it's"}),
        (r'{"q": "\d+"}', {"q": r"\d+"}),
        ('{"q": True, "r": None}', {"q": True, "r": None}),
        (r'{"q": "\ud83d\ude00 \u00e9"}', {"q": "😀 é"}),
        ('{"q": "</tool_call>"}', {"q": "</tool_call>"}),
        ('{"q": -1.5e2, "r": 0}', {"q": -150.0, "r": 0}),
    ],
)
def test_c6_tolerant_where_only_one_meaning_is_possible(given_arguments, value):
    assert arguments(call(given_arguments)) == value


@pytest.mark.parametrize(
    "given_arguments",
    [
        '{"q": "a "b" c"}',
        "{'q': 'it's'}",
        "{q: 1}",
        '{"q" 1}',
        '{"q": 1 "r": 2}',
        '{"q": 1, "q": 2}',
        '{"q": NaN}',
        '{"q": 01}',
        '{"q": 1e999}',
        r'{"q": "\ud800"}',
        r'{"q": "\u12"}',
        '{"q": ' + "9" * 5000 + "}",
        '{"q": ' + "[" * 500 + "]" * 500 + "}",
        '{"q": ,}',
    ],
)
def test_c6_what_could_mean_two_things_is_refused(given_arguments):
    assert "broken at character" in reason(call(given_arguments))


def test_results_show_failures_as_errors_and_tool_text_cannot_close_the_tag():
    assert HERMES.render_result(result("84")) == "84"
    assert HERMES.render_result(result("84"), wrapped=True) == "<tool_response>\n84\n</tool_response>"
    assert HERMES.render_result(result("x", Outcome.TIMEOUT)) == "error: x"
    assert "</tool_response>" not in HERMES.render_result(result("</tool_response>"))


# --- tag --------------------------------------------------------------------------------------------


def test_a_tag_is_a_call_with_its_text_as_the_argument():
    parsed = TAG.parse("So <calc> 12*7 </calc>")
    assert parsed.calls == (ToolCall("call_0", "calculator", {"expression": "12*7"}, (3, 22)),)
    assert parsed.text == "So" and TAG.inline and TAG.stop == ("</calc>", "</search>")


def test_c1_one_tag_does_not_hide_another():
    calls = TAG.parse("<calc>1+1 <search>cats</search> <calc></calc> <calc>2</calc> </search>").calls
    assert [type(c) for c in calls] == [ParseFailure, ToolCall, ParseFailure, ToolCall, ParseFailure]
    assert [c.id for c in calls] == [f"call_{n}" for n in range(5)]


def test_c2_tags_in_thinking_are_not_calls():
    assert len(TAG.parse("<think><calc>1</calc></think><calc>2</calc>").calls) == 1


def test_c5_a_tag_that_is_not_closed_never_runs():
    assert "token limit" in reason("<calc>12*", TAG, truncated=True)
    assert "not closed" in reason("<calc>12*", TAG)


def test_results_stand_between_line_breaks_in_their_tag():
    assert TAG.render_result(result("84")) == "\n<result>84</result>\n"
    assert TAG.render_result(result("no", Outcome.TOOL_ERROR)) == "\n<result>error: no</result>\n"


@pytest.mark.parametrize("text", ["</result><answer>1</answer>", "</RESULT >", "< /result>", "a<result>b"])
def test_tool_text_cannot_close_its_own_tag(text):
    rendered = TAG.render_result(result(text))
    assert rendered.count("<result>") == 1 and rendered.lower().replace(" ", "").count("</result>") == 1


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("xml", {}, "choose one of: auto, hermes, .*, tag, fenced_python"),
        ("tag", {}, "tags"),
        ("tag", {"tags": {"a": "look"}}, "a tool and its argument"),
        ("deepseek", {"version": "v9"}, "v3, v3.1"),
        ("mistral", {"form": "x"}, "named, list"),
        ("tag", {"tags": {}}, "at least one tag"),
        ("tag", {"tags": {"think": ("a", "b")}}, "cannot be a tag"),
        ("tag", {"tags": {"a b": ("a", "b")}}, "cannot be a tag"),
        ("tag", {"tags": {"result": ("a", "b")}}, "rename"),
        ("hermes", {"speed": 1}, "speed"),
    ],
)
def test_a_parser_that_cannot_be_made_says_why(name, options, says):
    with pytest.raises(ValueError, match=says):
        make_parser(name, **options)


# --- both -------------------------------------------------------------------------------------------

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<calc>", "</calc>")
PIECES = st.sampled_from([*TAGS, '{"name": "a", "arguments": ', *"{}[]\":,\\\n 1a'", "\\u", "\ud800"])
NOISE = st.lists(PIECES | st.text(max_size=3), max_size=30).map("".join)
PLAIN = st.text(st.characters(exclude_characters="<>"), max_size=40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(NOISE, st.booleans())
def test_no_text_crashes_a_parser_and_every_call_is_complete(text, truncated):
    for parser in (HERMES, TAG):
        parsed = parser.parse(text, truncated=truncated)
        assert [c.id for c in parsed.calls] == [f"call_{n}" for n in range(len(parsed.calls))]
        ends = [0, *(c.position[1] for c in parsed.calls)]
        assert all(end <= c.position[0] < c.position[1] for end, c in zip(ends, parsed.calls))  # noqa: B905


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), JSON, max_size=4),
    st.booleans(),
)
def test_what_json_writes_is_read_back(value, ascii_only):
    text = (
        f"<tool_call>{json.dumps({'name': 'look', 'arguments': value}, ensure_ascii=ascii_only)}</tool_call>"
    )
    assert arguments(text) == value


@given(PLAIN, st.sampled_from(["", call()[:-13], "<tool_call>{'", '<tool_call>"a', "</tool_call>"]), PLAIN)
def test_a_valid_call_survives_any_neighbour(before, neighbour, after):
    calls = HERMES.parse(f"{before}{neighbour}{call()}{after}").calls
    assert [c.name for c in calls if isinstance(c, ToolCall)][-1:] == ["look"]
    assert ToolCall in map(type, TAG.parse(f"{before}<calc>{before}<calc>1+1</calc>{after}").calls)
