"""Rule rewards: building blocks for a user's own, and rewards ready for a config file.

    rewards = ["tasks.rules:exact_match", "tasks.rules:no_wasted_calls"]

Invariant: answers are read from what the model wrote, outside its thinking; tool text never counts.
The ready rewards compare with the row's field `answer`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from tasks.reward import reward
from tasks.types import Episode
from toolcall.parsers.thinking import without_thinking
from toolcall.types import Outcome, ParseFailure, Parser, ToolCall, ToolResult

UNREADABLE = (Outcome.PARSE_ERROR, Outcome.INVALID_ARGUMENTS, Outcome.UNKNOWN_TOOL)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)


def extract_answer(episode: Episode, tag: str = "answer") -> str | None:
    """The last `<tag>…</tag>` that the model wrote within one turn, stripped; None if there is none."""
    pattern = re.compile(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", re.DOTALL)
    for turn in reversed(episode.turns):
        if found := pattern.findall(without_thinking(turn)):
            return found[-1].strip()
    return None


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the comparison of SQuAD (Rajpurkar 2016)."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def same_text(given: str, expected: Any) -> bool:
    """Equal after `normalise`; `expected` may be a list of accepted answers."""
    accepted = expected if isinstance(expected, list | tuple) else [expected]
    return any(normalise(given) == normalise(str(item)) for item in accepted)


def same_number(given: str, expected: Any, tolerance: float = 1e-6) -> bool:
    """`given` holds exactly one number, equal to `expected` within `tolerance` (relative above 1)."""
    found = _NUMBER.findall(given)
    if len(found) != 1:
        return False
    wanted = float(str(expected).replace(",", ""))
    return abs(float(found[0].replace(",", "")) - wanted) <= tolerance * max(1.0, abs(wanted))


def all_results(episode: Episode) -> list[ToolResult]:
    """The results of every call of the episode, in order."""
    return [result for turn in episode.results for result in turn]


def made_calls(episode: Episode, parser: Parser) -> list[tuple[ToolCall | ParseFailure, ToolResult]]:
    """Every answered call of the episode with its result, in order; for rewards that look at arguments."""
    pairs = []
    for turn, results in zip(episode.turns, episode.results, strict=True):
        calls = {call.id: call for call in parser.parse(turn).calls}
        pairs += [(calls[result.call_id], result) for result in results if result.call_id in calls]
    return pairs


@reward
def exact_match(episode: Episode, answer: Any) -> float:
    """1 if the model's `<answer>` is the row's answer after normalisation, else 0."""
    given = extract_answer(episode)
    return float(given is not None and same_text(given, answer))


@reward
def numeric_match(episode: Episode, answer: Any) -> float:
    """1 if the one number in the model's `<answer>` is the row's answer, else 0."""
    given = extract_answer(episode)
    return float(given is not None and same_number(given, answer))


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
