"""Training prompts that leave no room to answer, and how calls are read, found before a run starts.

Such a prompt would end every episode at once and teach nothing. Run by the launcher, in a process of its own
because it needs the tokenizer:

    python -m actors.prompt_lengths --config c.toml --model folder     (prints one line of JSON)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from actors.agent_loop import MIN_TURN_TOKENS
from actors.renderer import Renderer, RendererError, load_tokenizer, make_renderers
from configs.load import load_config
from tasks.mixture import load_mixture
from tasks.types import Message, Row, Task


def too_long(task: Task, renderer: Renderer, max_trajectory_tokens: int) -> list[int]:
    """Indices of `task.train`, in order."""
    limit = max_trajectory_tokens - MIN_TURN_TOKENS
    if task.offered is not None:
        return [i for i, row in enumerate(task.train) if _length(task, renderer, row) > limit]
    # A token is a byte or more, and the template's own share is no longer than the first prompt: most
    # rows need not be tokenised.
    frame = len(renderer.prompt(task.make_messages(task.train[0])))
    found = []
    for index, row in enumerate(task.train):
        messages = task.make_messages(row)
        if frame + _bytes(messages) > limit and len(renderer.prompt(messages)) > limit:
            found.append(index)
    return found


def _length(task: Task, renderer: Renderer, row: Row) -> int:
    return len(renderer.offering(task.tools_of(row)).prompt(task.make_messages(row)))


def _bytes(messages: Sequence[Message]) -> int:
    return sum(len(str(message["content"]).encode()) for message in messages)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m actors.prompt_lengths")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a prepared model folder")
    options, overrides = parser.parse_known_args(arguments)
    loaded = load_config(options.config, overrides)
    config = loaded.config
    mixture = load_mixture(config.task, loaded.config_dir, config.seed)
    try:
        renderers = make_renderers(load_tokenizer(options.model), mixture, config.model.renderer)
    except RendererError as error:
        sys.exit(f"error: {error}")
    found = [
        too_long(part.task, renderer, part.limits.max_trajectory_tokens)
        if part.limits.data or part.task.offered
        else []
        for part, renderer in zip(mixture.parts, renderers, strict=True)
    ]
    print(json.dumps({"too_long": found, "syntaxes": [str(renderer.syntax) for renderer in renderers]}))


if __name__ == "__main__":
    main()
