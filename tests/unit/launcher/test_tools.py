"""`launch.py tools`: listing what the model is offered, and trying one call."""

import pytest

from launcher import commands
from launcher.preflight import PreflightError

QUESTIONS = '{"question": "Where?", "answer": "here"}\n' * 2
MODULE = '''
from tasks import reward
from toolcall import ToolContext, tool

closed = []


@tool
async def about(word: str, context: ToolContext) -> str:
    """Say where.

    Args:
        word: Any.
    """
    context.resources.callback(closed.append, word)
    return f"[bold]{word}[/bold] {context.row['question']}"


@reward
async def right(trajectory, answer: str) -> float:
    return 1.0
'''
CONFIG = """
[task]
data = "questions.jsonl"
tools = ["{module}:about"]
rewards = ["{module}:right"]
"""


@pytest.fixture
def config(tmp_path, request):
    module = f"tools_of_{request.node.name.partition('[')[0]}"  # a module is imported once in a process
    (tmp_path / f"{module}.py").write_text(MODULE)
    (tmp_path / "questions.jsonl").write_text(QUESTIONS)
    path = tmp_path / "a.toml"
    path.write_text(CONFIG.format(module=module))
    return path


def test_tools_are_listed_with_their_schemas(config, capsys):
    assert commands.tools(config, []) == 0
    output = capsys.readouterr().out
    assert "tool about" in output and '"description": "Say where."' in output and "context" not in output


def test_a_call_runs_with_a_prompts_row_and_its_text_is_printed_as_it_is(config, capsys):
    assert commands.tools(config, ["call", "about", '{"word": "a"}', "--task.held_out", "0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("about: ok in ") and second == "[bold]a[/bold] Where?"


def test_a_call_that_fails_is_a_failure(config, capsys):
    assert commands.tools(config, ["call", "abuot", "{}"]) == 1
    output = capsys.readouterr().out
    assert "unknown_tool" in output and "did you mean 'about'?" in output
    assert commands.tools(config, ["call", "about"]) == 1
    assert "argument 'word' is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cal", "about"], "unexpected 'cal about' after tools; write: python launch.py tools call NAME"),
        (["call"], "unexpected 'call' after tools"),
        (["call", "about", "{word: 1}"], "'{word: 1}' are not JSON"),
        (["call", "about", "[1]"], r"'\[1\]' are no JSON object"),
    ],
)
def test_a_malformed_call_says_how_to_write_it(config, words, says):
    with pytest.raises(PreflightError, match=says):
        commands.tools(config, words)


def test_a_server_that_cannot_start_is_one_sentence(config):
    with pytest.raises(PreflightError, match=r"cannot be loaded: task\.mcp\.town\.command = .atlantis."):
        commands.tools(config, ["--task.mcp.town.command", "atlantis"])
