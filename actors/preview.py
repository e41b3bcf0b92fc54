"""What the model and the learner see, token by token: for `launch.py check` and `launch.py show`.

Reads a task's prompt or a stored trajectory; never starts an engine.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from actors.renderer import load_tokenizer, make_renderer
from buffer.messages import Trajectory
from configs.schema import RunConfig
from tasks.types import Task
from toolcall.types import CallSpan, Outcome, ToolResult

PROMPT, ACTION, OBSERVATION = "dim", "bold green", "cyan"


def render_preview(config: RunConfig, task: Task, model_path: Path) -> Text:
    """The first training prompt with a made-up call and result after it, coloured by action mask."""
    tokenizer = load_tokenizer(model_path)
    renderer = make_renderer(tokenizer, task, config.model.renderer)
    prompt = renderer.prompt(task.make_messages(task.train[0]))
    call = tokenizer.encode("(here the model writes its call)", add_special_tokens=False)
    span = CallSpan("call00000", "tool", Outcome.OK, 0.0, 0.0, 0.0)
    result = ToolResult("call00000", "tool", Outcome.OK, "(here stands the tool's result)", span)
    observation = renderer.observation(prompt, call, [result])
    text = Text(f"{renderer.syntax}\n\n")
    for ids, style in ((prompt, PROMPT), (call, ACTION), (observation, OBSERVATION)):
        text.append(tokenizer.decode(ids), style)
    text.append(f"\n\n{len(prompt)} prompt tokens (dim) and {len(observation)} observation tokens (cyan): ")
    text.append("mask 0, never trained. ")
    text.append("The model's own tokens: mask 1.", ACTION)
    return text


def trajectory_table(trajectory: Trajectory, model_path: Path, context: int = 8) -> Table:
    """One row a token: id, text, mask, version, logprob. Only the last `context` prompt tokens."""
    tokenizer = load_tokenizer(model_path)
    table = Table(title=f"{trajectory.trajectory_id}: reward {trajectory.reward}, {trajectory.stop_reason}")
    for column in ("#", "id", "token", "mask", "version", "logprob"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for i in range(max(0, trajectory.prompt_len - context), len(trajectory.token_ids)):
        token, sampled = int(trajectory.token_ids[i]), bool(trajectory.action_mask[i])
        style = ACTION if sampled else PROMPT if i < trajectory.prompt_len else OBSERVATION
        table.add_row(
            str(i),
            str(token),
            repr(tokenizer.decode([token])),
            str(int(sampled)),
            str(int(trajectory.versions[i])) if sampled else "",
            f"{trajectory.logprobs[i]:.4f}" if sampled else "",
            style=style,
        )
    return table
