"""What a task is: data, a prompt, tools, a call syntax and rewards. Knows no engine and no learner.

Used by the actors (which roll trajectories out), by `tasks.scoring`, and by `launch.py check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from toolcall.parsers.thinking import without_thinking
from toolcall.registry import Tool
from toolcall.types import ParsedTurn, Parser, ToolContext, ToolResult

Row = dict[str, Any]
Message = dict[str, Any]  # {"role": ..., "content": ...}, as chat templates take them
EPISODE_NAMES = ("episode", "trajectory")  # a reward's parameters of these names are the `Episode`


@dataclass(frozen=True)
class Episode:
    """A finished trajectory as rewards see it: text, not tokens."""

    row: Row
    messages: tuple[Message, ...]  # the prompt
    turns: tuple[str, ...]  # what the model wrote, turn by turn, without special tokens
    results: tuple[tuple[ToolResult, ...], ...]  # tool results after each turn (empty if none)
    stop_reason: str  # a buffer.messages.StopReason
    num_tokens: int = 0  # sampled
    parsed: tuple[ParsedTurn, ...] = ()  # each turn as the agent loop read it
    scores: dict[str, float] = field(default_factory=dict, compare=False)
    # each reward's unweighted value by name; filled by `tasks.scoring.score`, for `Task.success`
    context: ToolContext = field(default_factory=ToolContext, compare=False)
    # what the tools got: their `state` as they left it, this trajectory's id and rng

    @property
    def text(self) -> str:
        """Everything the model wrote itself. Tool text is not in it (see CASES R4)."""
        return "\n".join(self.turns)

    @property
    def spoken(self) -> tuple[str, ...]:
        """Each turn without its thinking, also where the prompt had opened it or nothing closes it."""
        begun = [turn.thinking for turn in self.parsed] or [False] * len(self.turns)
        return tuple(without_thinking(t, thinking=b) for t, b in zip(self.turns, begun, strict=True))

    @property
    def transcript(self) -> str:
        """What the model wrote and what the tools answered, in order: for rewards that ask for all."""
        parts = []
        for turn, results in zip(self.turns, self.results, strict=True):
            parts += [turn, *(result.text for result in results)]
        return "\n".join(parts)


@dataclass(frozen=True)
class Reward:
    """A named, weighted score. `fn`'s arguments are filled by name, see `tasks.reward`.

    A function that takes the group but no trajectory is asked once a group, for a value per member.
    """

    name: str
    fn: Callable[..., Any]  # sync or async; returns a float, one for each turn, or None (unscorable)
    weight: float = 1.0
    timeout_s: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments that the config sets
    fields: Mapping[str, str] = field(default_factory=dict)  # argument -> the row's field of another name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, so that a decorated reward stays usable inside another."""
        return self.fn(*args, **kwargs)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    @property
    def sees_group(self) -> bool:
        """It waits for all members of the group."""
        return "group" in self.parameters

    @property
    def once_a_group(self) -> bool:
        """One call gives the values of all members."""
        return self.sees_group and not any(name in self.parameters for name in EPISODE_NAMES)


@dataclass(frozen=True)
class Score:
    """`reward` is the weighted sum, or None with the reason in `error` if any part is unscorable."""

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    turn_rewards: tuple[float, ...] = ()  # what each turn earned, a part of `reward`; empty: no reward says


@dataclass(frozen=True)
class Task:
    """Everything an actor needs to roll a prompt out. Built by `tasks.loading.load_task(config)`."""

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row]
    make_messages: Callable[[Row], list[Message]]
    tools: Sequence[Tool]
    parser: Parser | None  # None: the one that fits the model's chat template
    rewards: Sequence[Reward]
    success: Callable[[Episode], bool]  # for success rates; not a reward. Called once all rewards are known
    tools_in_prompt: bool = False  # the prompt itself teaches the tools; the chat template need not
    prefill: str = ""  # text that starts every assistant turn, as part of the prompt
    offered: Callable[[Row], Sequence[Tool]] | None = None
    # what a row offers: some of `tools`, or tools that it describes itself; None: every row offers `tools`

    def tools_of(self, row: Row) -> Sequence[Tool]:
        return self.tools if self.offered is None else self.offered(row)
