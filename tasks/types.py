"""What a task is: data, a prompt, tools, a call syntax and rewards. Knows no engine and no learner.

Used by the actors (which roll trajectories out), by `tasks.scoring`, and by `launch.py check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcall.types import Parser, ToolResult

Row = dict[str, Any]
Message = dict[str, Any]  # {"role": ..., "content": ...}, as chat templates take them


@dataclass(frozen=True)
class Episode:
    """A finished trajectory as rewards see it: text, not tokens."""

    row: Row
    messages: tuple[Message, ...]  # the prompt
    turns: tuple[str, ...]  # what the model wrote, turn by turn, without special tokens
    results: tuple[tuple[ToolResult, ...], ...]  # tool results after each turn (empty if none)
    stop_reason: str  # a buffer.messages.StopReason
    num_tokens: int = 0  # sampled
    scores: dict[str, float] = field(default_factory=dict, compare=False)
    # each reward's unweighted value by name; filled by `tasks.scoring.score`, for `Task.success`

    @property
    def text(self) -> str:
        """Everything the model wrote itself. Tool text is not in it (see CASES R4)."""
        return "\n".join(self.turns)


@dataclass(frozen=True)
class Reward:
    """A named, weighted score of an episode. `fn`'s arguments are filled by name, see `tasks.reward`."""

    name: str
    fn: Callable[..., Any]  # sync or async; returns float or None (unscorable)
    weight: float = 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, so that a decorated reward stays usable inside another."""
        return self.fn(*args, **kwargs)


@dataclass(frozen=True)
class Score:
    """`reward` is the weighted sum, or None with the reason in `error` if any part is unscorable."""

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Task:
    """Everything an actor needs to roll a prompt out. Built by `tasks.loading.load_task(config)`."""

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row]
    make_messages: Callable[[Row], list[Message]]
    tools: Sequence[Any]  # toolcall.registry.Tool
    parser: Parser
    rewards: Sequence[Reward]
    success: Callable[[Episode], bool]  # for success rates; not a reward. Called after scoring
    tools_in_prompt: bool = False  # the prompt itself teaches the tools; the chat template need not
    prefill: str = ""  # text that starts every assistant turn, as part of the prompt
