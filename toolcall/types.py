"""The types that tools, parsers, the executor and the agent loop share.

Invariant: every call that the model wrote becomes exactly one `ToolResult`, in call order,
paired by id, whatever happened to it. A failed call is text that the model can read.

Used by the parsers (which make `ParsedTurn`), the executor (which makes `ToolResult`), and
`actors.agent_loop` (which renders results and records spans).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Outcome(StrEnum):
    """How a call ended. Only `OK` carries the tool's own answer."""

    OK = "ok"
    TOOL_ERROR = "tool_error"  # the tool raised
    PARSE_ERROR = "parse_error"  # the model's syntax was broken
    INVALID_ARGUMENTS = "invalid_arguments"  # the schema refused the arguments
    UNKNOWN_TOOL = "unknown_tool"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BREAKER_OPEN = "breaker_open"  # too many recent failures: not tried
    INFRASTRUCTURE = "infrastructure"  # the tool's server is gone; not the model's fault


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call found in a turn. `position` is (start, end) in characters of the turn."""

    id: str
    name: str
    arguments: dict[str, Any]
    position: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ParseFailure:
    """Something meant as a call that could not be read. `reason` is written for the model."""

    id: str
    reason: str
    name: str | None = None
    position: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ParsedTurn:
    """What a parser found: calls and failures in the order in which the model wrote them."""

    calls: tuple[ToolCall | ParseFailure, ...] = ()
    text: str = ""  # the turn without its calls and thinking sections
    thinking: bool = False  # the prompt had opened a thinking section, in which the turn begins


@dataclass(frozen=True)
class CallSpan:
    """When a call ran, how it ended, and what a cache had to do with it. Times are `time.time()` seconds."""

    call_id: str
    name: str
    outcome: Outcome
    queued: float
    started: float
    ended: float
    cache: str = ""  # "" without a cache; "made", "shared" with a running call, "kept" in memory, "disk"
    cache_age_s: float = 0.0  # since the result that was served was made

    @property
    def cached(self) -> bool:
        """Another call's run answered this one."""
        return self.cache in ("shared", "kept", "disk")


@dataclass(frozen=True)
class ToolResult:
    """What goes back to the model for one call. `text` is already cut to the tool's output budget."""

    call_id: str
    name: str
    outcome: Outcome
    text: str
    span: CallSpan
    keep: str = "head"  # the side to keep if the text must be cut further: head, tail or both


@dataclass
class ToolContext:
    """Per-trajectory facts injected into a tool's `context` parameter; never part of its schema."""

    trajectory_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    row: dict[str, Any] = field(default_factory=dict)  # the prompt's row of the task's data
    state: dict[str, Any] = field(default_factory=dict)  # this trajectory's own
    rng: random.Random = field(default_factory=random.Random)  # seeded per trajectory
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    # this trajectory's clean-ups: a tool registers them, `Executor.finish` runs them once
    instances: dict[Any, Any] = field(default_factory=dict)  # objects of class tools, by their class
    offered: Mapping[str, Any] | None = None  # the `Tool`s that it may call, by name; None: all there are
    spans: list[CallSpan] = field(default_factory=list)  # of every call so far, also of cancelled ones
    idempotency_key: str = ""  # unique per call, the same on a retry of it


class Parser(Protocol):
    """Turns the text of one assistant turn into calls, and calls and results into text. Pure: no state
    between turns, and `parse` never raises."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a generation because a call is complete; may be empty."""
        ...

    @property
    def inline(self) -> bool:
        """True: results continue the same assistant turn; False: they are tool messages."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """The syntax's own tags: where a tokenizer has them as special tokens, they stay in the text."""
        ...

    @property
    def result_tag(self) -> str:
        """The tag around results; empty for none."""
        ...

    @property
    def targets(self) -> tuple[tuple[str, str], ...]:
        """Inline syntaxes: the tools that can be called, each with the argument that is filled."""
        ...

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        """Find the calls in `text`. `truncated`: the turn was cut by a token limit, so an unclosed call
        at its end is a ParseFailure and does not run. `thinking`: the prompt has opened a thinking section,
        so that the turn begins inside it."""
        ...

    def render_result(self, result: ToolResult, *, wrapped: bool = False) -> str:
        """The text that shows one result to the model, without any special token: a tool message's content,
        or for inline syntaxes all that comes between the call and what the model writes next. `wrapped`: in
        `result_tag`, for chat templates that put no tag around tool messages."""
        ...

    def render_text(self, text: str, *, wrapped: bool = False) -> str:
        """The same for the text of a result that went well, for worked examples."""
        ...

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the model would write them, for worked examples."""
        ...

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Words that offer the tools and teach the syntax, for prompts and templates that do not."""
        ...

    def offered_as(self, tool: str) -> str:
        """What a prompt must contain to have offered that tool."""
        ...

    def for_tools(self, schemas: Sequence[Mapping[str, Any]]) -> Parser:
        """The same syntax where these tools are offered."""
        ...
