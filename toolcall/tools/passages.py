"""What the `search` tools have in common: a passage, and how a model reads a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_FIELDS = ("text", "contents", "content", "passage")
NO_HIT = "no passage matches; try other words"


@dataclass(frozen=True)
class Passage:
    text: str
    title: str = ""
    score: float = 0.0


def read_passage(row: Mapping[str, Any], score: float = 0.0) -> Passage:
    """A corpus row. Where there is no title field, `contents` may begin with a title in quotes, as in the
    corpora of Search-R1. Raises ValueError if the row has no text."""
    text = next((row[name] for name in TEXT_FIELDS if isinstance(row.get(name), str)), None)
    if text is None:
        raise ValueError(
            f"has no text under any of {', '.join(TEXT_FIELDS)}; it has {', '.join(row) or 'none'}"
        )
    title = row.get("title") or ""
    first, newline, rest = text.partition("\n")
    if not title and newline and len(first) > 2 and first[0] == first[-1] == '"':
        title, text = first.strip('"'), rest
    return Passage(text.strip(), str(title).strip(), score)


def show(passages: Sequence[Passage], max_chars: int) -> str:
    """Numbered, best first, each cut to `max_chars`."""
    return "\n\n".join(
        "\n".join(
            part for part in (f"[{number}] {passage.title}".rstrip(), _cut(passage.text, max_chars)) if part
        )
        for number, passage in enumerate(passages, 1)
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"
