"""Rule rewards on the answer: building blocks for a user's own, and rewards ready for a config file.

    rewards = [
        "tasks.rules:exact_match",
        { use = "tasks.rules:regex_match", weight = 0.1, options = { pattern = "^[0-9]+$" } },
    ]

Invariant: answers are read from what the model wrote, outside its thinking; tool text never counts.
Those that compare do so with the row's field `answer`, or with another named by `fields = { answer = … }`.
How the episode went, not what it answered, is scored in `tasks.conduct`; mathematics in `tasks.mathematics`.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

from jsonschema import SchemaError
from jsonschema.validators import validator_for
from pydantic import AfterValidator

from tasks.conduct import no_wasted_calls, well_formed_calls
from tasks.reward import reward
from tasks.types import Episode
from toolcall.types import ParseFailure, Parser, ToolCall, ToolResult

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_OF_A_NUMBER = r"(?<!\w)-(?=\.?\d)|(?<!\w)\.(?=\d)|(?<=\d)(?:[-./:]|,(?!\d{3}(?!\d)))(?=\d)"
_PUNCTUATION = re.compile(f"{_OF_A_NUMBER}|([{re.escape(string.punctuation)}])")
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})
_THOUSANDS = re.compile("[,\u00a0\u2009\u202f]")  # comma, and the spaces that do not break a number
_NUMBER = re.compile(
    rf"[-+]?(?:(?:\d{{1,3}}(?:{_THOUSANDS.pattern}\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII
)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def extract_answer(episode: Episode, tag: str = "answer") -> str | None:
    """The last `<tag>…</tag>` that the model wrote within one turn, stripped; None if there is none.

    With an empty `tag`: all of the last turn.
    """
    if not tag:
        return final_text(episode)
    pattern = re.compile(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", re.DOTALL)
    for spoken in reversed(episode.spoken):
        if found := pattern.findall(spoken):
            return found[-1].strip()
    return None


def final_text(episode: Episode) -> str:
    """The last turn without its thinking, stripped."""
    return episode.spoken[-1].strip() if episode.turns else ""


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the comparison of SQuAD (Rajpurkar 2016).

    Of a text that has nothing else, such as the choice "A", these stay, or every empty answer would equal it.
    So do the signs of a number, or "-5" would be "5", "1.5" be "15" and "3/4" be "34".
    """
    whole = unicodedata.normalize("NFKC", text).casefold().translate(_MINUS)
    words = _PUNCTUATION.sub(lambda match: "" if match[1] else match[0], whole)
    return next((" ".join(t.split()) for t in (_ARTICLES.sub(" ", words), words, whole) if t.strip()), "")


def same_text(given: str, expected: Any) -> bool:
    """Equal after `normalise`; `expected` may be a list of accepted answers."""
    return any(normalise(given) == normalise(str(item)) for item in _accepted(expected))


def token_f1(given: str, expected: Any) -> float:
    """Harmonic mean of precision and recall over the words after `normalise`, as SQuAD has it; of several
    accepted answers the best. 1 where both are empty."""
    return max((_f1(normalise(given), normalise(str(item))) for item in _accepted(expected)), default=0.0)


def same_number(given: str, expected: Any, tolerance: float = 1e-6) -> bool:
    """`given` holds exactly one number, equal to `expected` within `tolerance` (relative above 1)."""
    found = _NUMBER.findall(given.translate(_MINUS))
    if len(found) != 1:
        return False
    wanted = _as_float(str(expected).translate(_MINUS))
    return abs(_as_float(found[0]) - wanted) <= tolerance * max(1.0, abs(wanted))


def _as_float(text: str) -> float:
    return float(_THOUSANDS.sub("", text))


def made_calls(
    episode: Episode, parser: Parser | None = None
) -> list[tuple[ToolCall | ParseFailure, ToolResult]]:
    """Every answered call of the episode with its result, in order; for rewards that look at arguments.

    `parser` is needed only for an episode that no agent loop has read.
    """
    parsed = episode.parsed or tuple(parser.parse(turn) for turn in episode.turns if parser)
    pairs = []
    for turn, results in zip(parsed, episode.results, strict=True):
        calls = {call.id: call for call in turn.calls}
        pairs += [(calls[result.call_id], result) for result in results if result.call_id in calls]
    return pairs


def _answerable(answer: Any) -> Any:
    items = _accepted(answer)
    if not items or any(item is None or not str(item).strip() for item in items):
        raise ValueError("it is empty, so an empty answer or none would be right; give the right one")
    return answer


def _numeric(answer: Any) -> Any:
    try:
        _as_float(str(answer).translate(_MINUS))
    except ValueError:
        raise ValueError("it is no number; give digits alone") from None
    return answer


@reward
def exact_match(
    episode: Episode, answer: Annotated[Any, AfterValidator(_answerable)], tag: str = "answer"
) -> float:
    """1 if the model's `<answer>` is the row's answer after normalisation, else 0."""
    return _compare(episode, tag, lambda given: same_text(given, answer))


@reward
def f1(episode: Episode, answer: Annotated[Any, AfterValidator(_answerable)], tag: str = "answer") -> float:
    """Word overlap of the model's `<answer>` with the row's answer, 0 to 1."""
    return _compare(episode, tag, lambda given: token_f1(given, answer))


@reward
def numeric_match(
    episode: Episode,
    answer: Annotated[Any, AfterValidator(_numeric)],
    tolerance: float = 1e-6,
    tag: str = "answer",
) -> float:
    """1 if the one number in the model's `<answer>` is the row's answer, else 0."""
    return _compare(episode, tag, lambda given: same_number(given, answer, tolerance))


@reward
def regex_match(episode: Episode, pattern: re.Pattern[str], tag: str = "answer") -> float:
    """1 if `pattern` (an option, or a field of the row) is found in the model's `<answer>`, else 0."""
    return _compare(episode, tag, lambda given: re.search(pattern, given) is not None)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    return schema


@reward
def json_schema(
    episode: Episode, schema: Annotated[dict[str, Any], AfterValidator(_checked)], tag: str = ""
) -> float:
    """1 if the last turn (or its `<tag>`), bare or in a ```json fence, is JSON under `schema`, else 0."""
    return _compare(episode, tag, lambda given: _is_valid(given, schema))


def _compare(episode: Episode, tag: str, rule: Callable[[str], bool | float]) -> float:
    given = extract_answer(episode, tag)
    return 0.0 if given is None else float(rule(given))


def _accepted(expected: Any) -> list[Any]:
    return list(expected) if isinstance(expected, list | tuple) else [expected]


def _f1(given: str, expected: str) -> float:
    ours, theirs = given.split(), expected.split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _is_valid(given: str, schema: dict[str, Any]) -> bool:
    fenced = _FENCE.findall(given)
    try:
        value = json.loads(fenced[-1] if fenced else given)
        json.dumps(value, allow_nan=False)  # Python reads `NaN` and `1e999`, which JSON has not
    except (ValueError, RecursionError):
        return False
    return validator_for(schema)(schema).is_valid(value)


__all__ = [
    "exact_match",
    "extract_answer",
    "f1",
    "final_text",
    "json_schema",
    "made_calls",
    "no_wasted_calls",
    "normalise",
    "numeric_match",
    "regex_match",
    "same_number",
    "same_text",
    "token_f1",
    "well_formed_calls",
]
