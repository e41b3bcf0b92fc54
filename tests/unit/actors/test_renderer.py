"""Renderers: exact continuation, refusals at start-up."""

import pytest

from actors.renderer import RendererError, make_renderer
from actors.template_renderer import TemplateRenderer
from tests.tiny import CHATML, tiny_tokenizer
from tests.unit.actors.support import calculator, make_task
from toolcall.types import CallSpan, Outcome, ToolResult


def result(text: str, number: int = 0) -> ToolResult:
    span = CallSpan(f"call-{number}", "calculator", Outcome.OK, 0, 0, 0)
    return ToolResult(f"call-{number}", "calculator", Outcome.OK, text, span)


def test_continuation_equals_the_template_on_text():
    tokenizer, task = tiny_tokenizer(), make_task("hermes")
    renderer = make_renderer(tokenizer, task)
    opening = [{"role": "user", "content": "calculator?"}]
    prompt = renderer.prompt(opening)
    sampled = tokenizer.encode("a call<|im_end|>")
    results = [result("84"), result("2", 1)]
    ids = prompt + sampled + renderer.observation(prompt, sampled, results)
    messages = [*opening, {"role": "assistant", "content": "a call"}]
    messages += [{"role": "tool", "content": r.text} for r in results]
    assert tokenizer.decode(ids) == renderer.template(messages)


def test_t4_a_missing_end_of_turn_token_is_added_by_the_observation():
    tokenizer = tiny_tokenizer()
    renderer = make_renderer(tokenizer, make_task("hermes"))
    prompt = renderer.prompt([{"role": "user", "content": "Q"}])
    with_end = tokenizer.encode("call<|im_end|>")
    cut = with_end[:-1]
    observed, observed_cut = (renderer.observation(prompt, s, [result("84")]) for s in (with_end, cut))
    assert with_end + observed == cut + observed_cut
    assert len(observed_cut) == len(observed) + 1


def test_inline_result_does_not_double_a_newline_inside_the_stop_token():
    tokenizer = tiny_tokenizer()
    renderer = make_renderer(tokenizer, make_task("tag"))
    plain = renderer.observation([], tokenizer.encode("<calc>1+1</calc>"), [result("2")])
    after_newline = renderer.observation([], tokenizer.encode("<calc>1+1</calc>\n"), [result("2")])
    assert tokenizer.decode(plain) == "\n<result>2</result>\n"
    assert tokenizer.decode(after_newline) == "<result>2</result>\n"


DROPS_HISTORY = CHATML.replace("{% for message in messages %}", "{% for message in messages[-1:] %}")
STRIPS_OLD_TURNS = CHATML.replace(
    "message['content']",
    "(message['content'] if loop.last or message['role'] != 'assistant' else 'x')",
)
HIDES_TOOLS = CHATML.replace(
    "message['content']", "('' if message['role'] == 'tool' else message['content'])"
)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (DROPS_HISTORY, "rewrites earlier turns"),
        (STRIPS_OLD_TURNS, "rewrites earlier turns"),
        (HIDES_TOOLS, "does not show tool messages"),
    ],
)
def test_t8_a_template_without_exact_continuation_is_refused(template, says):
    with pytest.raises(RendererError, match=says):
        TemplateRenderer(tiny_tokenizer(template), make_task("hermes"))


def test_c15_tools_never_offered_by_the_template_are_a_startup_error():
    task = make_task("hermes", make_messages=lambda row: [{"role": "user", "content": row["question"]}])
    with pytest.raises(RendererError, match="never offers calculator"):
        make_renderer(tiny_tokenizer(), task)


def test_a_template_that_ignores_tools_gets_them_in_the_system_message():
    task = make_task(
        "hermes",
        make_messages=lambda row: [{"role": "user", "content": row["question"]}],
        tools_in_prompt=False,
    )
    tokenizer = tiny_tokenizer()
    renderer = make_renderer(tokenizer, task)
    text = tokenizer.decode(
        renderer.prompt([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
    )
    assert text.startswith("<|im_start|>system\nS\n\nYou can call tools.")
    assert '"name": "calculator"' in text and text.count("<|im_start|>system") == 1


def test_c15_a_template_that_shows_tools_is_fine():
    template = "{% for t in tools %}{{ t['function']['name'] }}\n{% endfor %}" + CHATML
    task = make_task(
        "hermes",
        make_messages=lambda row: [{"role": "user", "content": row["question"]}],
        tools_in_prompt=False,
        tools=[calculator],
    )
    renderer = make_renderer(tiny_tokenizer(template), task)
    assert "calculator" in tiny_tokenizer().decode(renderer.prompt([{"role": "user", "content": "Q"}]))
