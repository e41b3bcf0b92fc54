"""Rewards on how an episode went: its calls, its form, its length. Ready for a config file.

Invariant: they look at the model's own turns and at how its calls ended, never at a tool's words.
"""

from __future__ import annotations

import re

from tasks.reward import reward
from tasks.types import Episode
from toolcall.types import Outcome, ToolResult

UNREADABLE = (Outcome.PARSE_ERROR, Outcome.INVALID_ARGUMENTS, Outcome.UNKNOWN_TOOL)


def all_results(episode: Episode) -> list[ToolResult]:
    """The results of every call of the episode, in order."""
    return [result for turn in episode.results for result in turn]


@reward(weight=0.1)
def well_formed_calls(episode: Episode) -> float:
    """Share of calls that could be read and named a tool and its arguments rightly; 0 without a call."""
    results = all_results(episode)
    return sum(r.outcome not in UNREADABLE for r in results) / len(results) if results else 0.0


@reward(weight=0.1)
def no_wasted_calls(episode: Episode) -> float:
    """1 if there were calls, all succeeded, and none gave what an earlier one had given; else 0."""
    results = all_results(episode)
    succeeded = all(r.outcome is Outcome.OK for r in results)
    distinct = len({(r.name, r.text) for r in results}) == len(results)
    return float(bool(results) and succeeded and distinct)


@reward(weight=0.1)
def tool_efficiency(episode: Episode, calls_needed: int = 1) -> float:
    """`calls_needed` (an option, or a field of the row) over the calls made, at most 1; 0 if none succeeded.

    Weigh it low or beside a success reward: alone it is earned by any one call.
    """
    results = all_results(episode)
    if not any(result.outcome is Outcome.OK for result in results):
        return float(calls_needed == 0 and not results)
    return min(1.0, calls_needed / len(results))


@reward(weight=0.1)
def answer_format(episode: Episode, tag: str = "answer") -> float:
    """1 if the model wrote exactly one `<answer>…</answer>`, not empty, and ended with it, else 0."""
    if not episode.turns:
        return 0.0
    written = [spoken.strip() for spoken in episode.spoken]
    opened = sum(turn.count(f"<{tag}>") for turn in written)
    closed = sum(turn.count(f"</{tag}>") for turn in written)
    pattern = rf"<{re.escape(tag)}>\s*\S.*?</{re.escape(tag)}>\Z"
    return float(opened == closed == 1 and re.search(pattern, written[-1], re.DOTALL) is not None)


@reward
def overlong(episode: Episode, limit: int, margin: int) -> float:
    """0 up to `limit - margin` sampled tokens, falling linearly to -1 at `limit` and staying there.

    The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).
    """
    if not 0 < margin <= limit:
        raise ValueError(f"margin = {margin} must be above 0 and at most limit = {limit}")
    return max(-1.0, min(0.0, (limit - margin - episode.num_tokens) / margin))
