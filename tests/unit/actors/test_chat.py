"""Chat: the task's own loop for each message, and a conversation that remembers."""

import asyncio
import io
import subprocess
import sys

import pytest
from rich.console import Console

from actors.chat import chat, chat_task
from actors.evaluator import roll_with
from tests.unit.actors.support import make_rollouts, make_task

HERMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*7"}}</tool_call><|im_end|>'
CALLS = {"tag": "<calc>12*7</calc>", "hermes": HERMES}


@pytest.mark.parametrize("syntax", ["tag", "hermes"])
def test_a_message_runs_the_tools_and_the_next_remembers_it(syntax):
    task = make_task(syntax)
    turns = [CALLS[syntax], "It is 84<|im_end|>", "You asked for 84<|im_end|>", "Hello<|im_end|>"]
    rollouts, engine, tokenizer = make_rollouts(turns, task=chat_task(task))
    said = iter(["12 times 7?", " ", "What did I ask?\n", "/new\n", "Hi", None])
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    asyncio.run(chat(task, roll_with([rollouts]), lambda: next(said), console, 0.0))
    shown = screen.getvalue()
    assert "calculator: 84" in shown and "It is 84" in shown and "You asked for 84" in shown
    second, third = (tokenizer.decode(ids) for ids, *_ in engine.requests[2:])
    assert "12 times 7?" in second and "It is 84" in second and "What did I ask?<|im_end|>" in second
    assert second.count("12*7") == 1
    assert "12 times 7?" not in third and "Hi" in third


def test_what_ended_badly_is_said():
    task = make_task()
    rollouts, *_ = make_rollouts(["far too long an answer"], task=chat_task(task), max_tokens_per_turn=2)
    said = iter(["12 times 7?", "/quit"])
    screen = io.StringIO()
    asyncio.run(chat(task, roll_with([rollouts]), lambda: next(said), Console(file=screen), 0.0))
    assert "ended by max_tokens" in screen.getvalue()


def test_a_message_without_an_answer_is_not_remembered():
    """Some templates take no two questions in a row."""
    task = make_task()
    rollouts, engine, tokenizer = make_rollouts(
        ["Hello<|im_end|>"], task=chat_task(task), max_trajectory_tokens=60
    )
    said = iter(["word " * 100, "Hi", None])
    screen = io.StringIO()
    asyncio.run(chat(task, roll_with([rollouts]), lambda: next(said), Console(file=screen, width=120), 0.0))
    assert "ended by context_length: no room is left in task.max_trajectory_tokens" in screen.getvalue()
    assert "word" not in tokenizer.decode(engine.requests[0][0])


def test_lines_come_one_by_one_and_waiting_for_one_ends_when_told():
    """Two lines at once in an open pipe, then none: a Ctrl-C sets `stop` while the reader waits."""
    code = """
import threading
from rich.console import Console
from actors.chat import read_line
stop = threading.Event()
print([read_line(Console(quiet=True), stop) for _ in range(2)], flush=True)
threading.Timer(0.1, stop.set).start()
print(read_line(Console(quiet=True), stop))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("one\ntwo\n")
        process.stdin.flush()
        assert process.stdout.read() == "['one\\n', 'two\\n']\nNone\n"
