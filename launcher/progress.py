"""Draws a `RunView`: a calm live picture for a terminal, one plain line a step for anything else.

Pure functions from data to a renderable or a string. Called by `launcher.display`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.box import ROUNDED
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.run_view import RunView, StepRow
from metrics import names

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32
_LOUD_FROM = 0.1  # share of trajectories without a reward
_WIDTH = 92


def curve(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """The values as a line of blocks, at most `width` of them, each the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    levels = [round((mean - low) / span * (len(_BLOCKS) - 1)) if span > 1e-12 else 0 for mean in means]
    return "".join(_BLOCKS[level] for level in levels)


def picture(view: RunView) -> RenderableType:
    """The whole live picture, at most `_WIDTH` columns wide and always the same number of lines."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", min_width=9, no_wrap=True)
    rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    history = [view.rows[step] for step in sorted(view.rows)]
    rows.add_row("step", _steps(view))
    reward = _with_curve(_number(view.last.reward if view.last else None), _rewards(history))
    rows.add_row("reward", reward.append(_unscored(view), "bold red"))
    rows.add_row("success", _with_curve(_percent(view.success), _successes(history)))
    if view.evaluates:
        rows.add_row("held out", _held_out(view))
    rows.add_row("actors", _actors(view))
    rows.add_row("learner", _learner(view))
    rows.add_row("staleness", _staleness(view))
    rows.add_row("tools", _tools(view))
    rows.add_row("buffer", _buffer(view))
    rows.add_row("balance", view.balance.advice if view.balance else "–")
    rows.add_row("last", Text(view.last_event))  # a tool's words may look like markup
    title = Text.assemble(("slipstream ", "bold"), (view.name, "cyan"))
    return Panel(rows, box=ROUNDED, title=title, title_align="left", width=_WIDTH, border_style="dim")


def plain_line(view: RunView, row: StepRow) -> str:
    """One step in one line, for logs and pipes."""
    get = row.metrics.get
    return (
        f"step {row.step}/{view.steps}  reward {row.reward:.3f}  success {_percent(row.success)}  "
        f"loss {get(names.LOSS, 0.0):.4f}  grad {get(names.GRAD_NORM, 0.0):.2f}  "
        f"staleness {get(names.STALENESS_MEAN, 0.0):.2f}  v{view.version}  {row.seconds:.1f} s "
        f"(wait {get(names.WAIT_S, 0.0):.1f})  actors {_rate(view.actor_tokens_per_s)}  "
        f"learner {_rate(view.learner_tokens_per_s)}  left {duration(view.seconds_left)}{_unscored(view)}"
    )


def evaluated(metrics: Mapping[str, float]) -> str:
    """One evaluation during training in one line."""
    get = metrics.get
    version, last = get(names.EVAL_VERSION, 0), get(names.EVAL_VERSION_MAX, 0)
    prompts = get(names.EVAL_PROMPTS, 0)
    left = "".join(
        f", {count:.0f} {what}"
        for what, count in (
            ("unscored", get(names.EVAL_UNSCORED, 0)),
            ("missing", get(names.EVAL_MISSING, 0)),
        )
        if count
    )
    found = "nothing scored"
    if prompts:
        interval = f"{get(names.EVAL_LOW, 0):.1%} – {get(names.EVAL_HIGH, 0):.1%}"
        found = f"success {get(names.EVAL_SUCCESS, 0):.1%} ({interval}) of {prompts:.0f} prompts"
    upto = f", sampled by up to v{last:.0f}" if last > version else ""
    return f"held out, step {get(names.EVAL_STEP, 0):.0f}, v{version:.0f}{upto}: greedy {found}{left}"


def duration(seconds: float | None) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`; `?` if unknown."""
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _steps(view: RunView) -> RenderableType:
    if view.last is None:
        waiting = ", ".join(f"{name} {state}" for name, state in view.states.items())
        return Text(f"0/{view.steps}   {waiting or 'roles are starting'}")
    line = Table.grid(padding=(0, 2))
    line.add_row(
        f"{view.step}/{view.steps}",
        ProgressBar(view.steps, view.step, width=30),
        f"{duration(view.elapsed_s)}, about {duration(view.seconds_left)} left",
    )
    return line


def _unscored(view: RunView) -> str:
    """Loud when many trajectories get no reward: a judge or a tool server is probably down."""
    share = view.unscored or 0.0
    return f"  {share:.0%} UNSCORED, why: logs/actor-*.log" if share >= _LOUD_FROM else ""


def _rewards(history: Sequence[StepRow]) -> list[float]:
    return [row.reward for row in history]


def _successes(history: Sequence[StepRow]) -> list[float]:
    return [row.success for row in history if row.success is not None]


def _with_curve(value: str, values: Sequence[float]) -> Text:
    return Text.assemble(f"{value:<8}", (curve(values), "green"))


def _held_out(view: RunView) -> Text:
    """The latest evaluation, and the curve of all."""
    scored = [one for one in view.evaluations if names.EVAL_SUCCESS in one]
    if not scored:
        return Text(f"{view.held_out.get('running', 0)} prompts running")
    curve_of_all = _with_curve(
        _percent(scored[-1][names.EVAL_SUCCESS]), [one[names.EVAL_SUCCESS] for one in scored]
    )
    return curve_of_all.append(f"  v{scored[-1][names.EVAL_VERSION]:.0f}", "dim")


def _actors(view: RunView) -> str:
    idle, paused = view.actor_share(names.ACTOR_IDLE_S), view.actor_share(names.ACTOR_PAUSED_S)
    return (
        f"{_rate(view.actor_tokens_per_s)}, {view.in_flight} in flight, idle {_percent(idle)}, "
        f"paused {_percent(paused)}"
    )


def _learner(view: RunView) -> str:
    if view.last is None:
        return "–"
    get = view.last.metrics.get
    return (
        f"{_rate(view.learner_tokens_per_s)}, waits {_percent(view.learner_wait)}, "
        f"loss {get(names.LOSS, 0.0):.4f}, grad {get(names.GRAD_NORM, 0.0):.2f}, "
        f"clipped {_percent(get(names.CLIP_FRACTION))}"
    )


def _staleness(view: RunView) -> str:
    version = f"weights v{view.version}"
    if view.last is None:
        return version
    get = view.last.metrics.get
    mean, largest = get(names.STALENESS_MEAN, 0.0), get(names.STALENESS_MAX, 0.0)
    return f"{mean:.2f} mean, {largest:.0f} max, {version}"


def _tools(view: RunView) -> str:
    if not view.tool_calls:
        return "no calls yet"
    seconds = view.tool_seconds or 0.0
    latency = f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
    return (
        f"{latency} a call, {_percent(view.tool_failures)} failed, {view.tool_calls} calls in the last minute"
    )


def _buffer(view: RunView) -> str:
    ready, running = view.ledger.get("ready", 0), view.ledger.get("running", 0)
    dropped = ", ".join(f"{count} {reason}" for reason, count in view.dropped.items())
    text = f"{ready} of {view.groups_per_batch} groups ready, {running} running"
    text += f", dropped {dropped}" if dropped else ""
    return text + (f", {view.skipped} skipped by curriculum" if view.skipped else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "– tok/s" if value is None else f"{value:,.0f} tok/s"


def before_after(before: dict[str, Any], after: dict[str, Any]) -> RenderableType:
    """Held-out success before and after training, from the evaluator's two results."""
    table = Table(title="held-out success", title_justify="left", box=ROUNDED)
    for column in ("decoding", "before", "after", "prompts"):
        table.add_column(column)
    for decoding in ("greedy", "sampled"):
        old, new = before[decoding], after[decoding]
        table.add_row(decoding, _interval(old), _interval(new), str(new["n"]))
    return table


def measured(label: str, result: dict[str, Any]) -> str:
    """One evaluation in one line."""
    return f"{label:<8} greedy {_interval(result['greedy'])}, sampled {_interval(result['sampled'])}"


def _interval(measure: dict[str, Any]) -> str:
    if not measure["n"]:
        return "nothing scored"
    return f"{measure['success']:.1%} ({measure['low']:.1%} – {measure['high']:.1%})"
