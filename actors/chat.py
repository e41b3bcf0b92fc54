"""Talk to a model with a task's tools: what it writes, what it calls, what comes back.

Each message runs one episode of the task's own loop (turns, limits, executor), the conversation so far being
its prompt; so what is seen here is what training would see. Tools that keep state begin anew with each
message. Run by `launch.py chat`, in a process of its own because of the engine:

    python -m actors.chat --config c.toml --model folder
"""

from __future__ import annotations

import argparse
import asyncio
import select
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from actors.agent_loop import Finished
from actors.chat_template import call_message, result_message
from actors.endpoint import EndpointError
from actors.evaluator import Draw, Roll, rolling
from actors.renderer import RendererError
from buffer.messages import StopReason
from configs.load import load_config
from tasks.mixture import Mixture, load_mixture
from tasks.types import Message, Row, Task
from toolcall.parsers.results import shown as shown_result
from toolcall.types import ToolCall

EXIT_STOPPED = 130
HELP = "your message; /new forgets the conversation, /quit or Ctrl-D ends"
_PROMPT = "[bold]>[/] "
_LOOK_EVERY_S = 0.2
_LIMITS: dict[str, str] = {  # that a stop reason names
    StopReason.MAX_TURNS: "task.max_turns",
    StopReason.MAX_TOKENS: "task.max_tokens_per_turn",
    StopReason.CONTEXT_LENGTH: "no room is left in task.max_trajectory_tokens or the model; /new begins anew",
}


def chat_task(task: Task) -> Task:
    """The task with the conversation as its prompt, and nothing to score."""

    def messages_of(row: Row) -> list[Message]:
        return row["messages"] if "messages" in row else task.make_messages(row)

    return replace(task, make_messages=messages_of, rewards=(), success=lambda episode: False)


def opening(task: Task) -> list[Message]:
    """What stands before the question in the task's prompts: system message and worked examples."""
    return task.make_messages(task.train[0])[:-1]


async def chat(
    task: Task, roll: Roll, read: Callable[[], str | None], console: Console, temperature: float
) -> None:
    """Until `read` gives None. `roll` is of `chat_task(task)`."""
    conversation = opening(task)
    number = 0
    console.print(f"[dim]{HELP}[/]")
    while (text := await asyncio.to_thread(read)) is not None:
        text = text.strip()  # prompts of training end in no line break either
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            conversation = opening(task)
            continue
        if not text:
            continue
        messages = [*conversation, {"role": "user", "content": text}]
        row = {**task.train[0], "messages": messages}  # what its tools know of a row is the first one's
        draw = Draw("chat", number, row, temperature, number, 1)
        finished = await roll(draw, draw.lease(), 0)
        show(finished, console)
        if finished.episode.turns:  # else it got no answer, and asking again is not two questions in a row
            conversation = continued(finished)
        number += 1


def show(finished: Finished, console: Console) -> None:
    episode, trajectory = finished.episode, finished.trajectory
    for turn, results in zip(episode.turns, episode.results, strict=True):
        console.print(turn.strip("\n"), style="green", markup=False, highlight=False)
        for result in results:
            style = "cyan" if result.outcome == "ok" else "red"
            console.print(f"  {result.name}: {result.text}", style=style, markup=False, highlight=False)
    if trajectory.error or trajectory.stop_reason != "answer":
        why = trajectory.error or _LIMITS.get(trajectory.stop_reason, "a limit")
        console.print(f"ended by {trajectory.stop_reason}: {why}", style="dim", markup=False)


def continued(finished: Finished) -> list[Message]:
    """The conversation with what the model and the tools have just added; the renderer puts it in the
    model's call syntax."""
    episode = finished.episode
    messages = list(episode.messages)
    for turn, parsed, results in zip(episode.turns, episode.parsed, episode.results, strict=True):
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        whole = calls and len(calls) == len(parsed.calls) == len(results)
        messages.append(call_message(parsed.text, calls) if whole else {"role": "assistant", "content": turn})
        messages += [result_message(r.call_id, r.name, shown_result(r)) for r in results]
    return messages


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m actors.chat")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--model", required=True, help="a prepared model folder, or http://…/v1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options, overrides = parser.parse_known_args(arguments)
    loaded = load_config(options.config, overrides)
    config = loaded.config
    part = load_mixture(config.task, loaded.config_dir, config.seed).parts[0]  # of a mixture the first
    task = part.task
    console = Console()

    stop = threading.Event()

    async def talk() -> None:
        talked = Mixture((replace(part, task=chat_task(task)),))
        async with rolling(config, talked, options) as roll:
            try:
                await chat(task, roll, lambda: read_line(console, stop), console, config.actors.temperature)
            finally:
                stop.set()

    try:
        asyncio.run(talk())
    except (EndpointError, RendererError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)


def read_line(console: Console, stop: threading.Event) -> str | None:
    """A line from the terminal or a pipe, None at its end or once `stop` is set: Ctrl-C must not wait for
    a line that this thread waits for."""
    console.print(_PROMPT, end="")
    with open(0, "rb", buffering=0, closefd=False) as terminal:  # a buffer would hide lines from select
        while not stop.is_set():
            if select.select([terminal], [], [], _LOOK_EVERY_S)[0]:
                return terminal.readline().decode(errors="replace") or None
    return None


if __name__ == "__main__":
    main()
