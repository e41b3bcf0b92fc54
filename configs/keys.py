"""The catalogue of config keys: dotted name, what it takes, default and its line of documentation.

Read off `configs.schema`, so that help, error messages and the schema cannot disagree.
Used by `configs.load` (messages, nearest key) and by `launch.py check --keys`.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import RunConfig

_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One setting. `open_ended` keys are tables whose own keys are free, e.g. `task.options`."""

    name: str  # dotted, e.g. "learner.lr"
    annotation: Any
    wanted: str  # in words, e.g. "a number above 0"
    default: Any
    doc: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def open_ended(self) -> bool:
        return get_origin(self.annotation) is dict

    @property
    def is_text(self) -> bool:
        """True if any word on the command line is already a value of this key."""
        return all(
            kind in (str, type(None)) or _is_word_choice(kind) for kind in _alternatives(self.annotation)
        )

    @property
    def holds_text(self) -> bool:
        """True if every entry of this open-ended key is text."""
        return self.annotation == dict[str, str]


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every key by dotted name, in the schema's order."""
    return {key.name: key for key in _walk(RunConfig, "")}


def documented_keys() -> Iterable[Key]:
    """Every key, and below a table of sections those of an entry called NAME."""
    for key in all_keys().values():
        yield from (key, *entry_keys(key, "NAME").values())


def sections() -> tuple[str, ...]:
    return tuple(name for name, field in RunConfig.model_fields.items() if _section_of(field))


def find_key(name: str) -> Key | None:
    """The key called `name`, or the open-ended key that `name` lies below (`task.options.syntax`)."""
    return _find(name, all_keys())


def entry_keys(key: Key, entry: str) -> dict[str, Key]:
    """The keys of one entry of a table of sections (`task.mcp` and the name of a server); else empty."""
    section = section_of_entries(key.annotation)
    return {k.name: k for k in _walk(section, f"{key.name}.{entry}.")} if section else {}


def section_of_entries(annotation: Any) -> type[BaseModel] | None:
    """What each entry of a `dict[str, Section]` is."""
    return _section(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _find(name: str, keys: Mapping[str, Key]) -> Key | None:
    if name in keys:
        return keys[name]
    for key in keys.values():
        if key.open_ended and name.startswith(key.name + "."):
            entry = name.removeprefix(key.name + ".").partition(".")[0]
            inner = entry_keys(key, entry)
            return _find(name, inner) if inner and name != f"{key.name}.{entry}" else key
    return None


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was probably meant to be: by its whole name, or by its last part
    when the section is missing or wrong. None if nothing is close."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.95 * last)

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def _walk(model: type[BaseModel], prefix: str) -> Iterable[Key]:
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section:
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield Key(
                name=prefix + name,
                annotation=field.annotation,
                wanted=_describe(field.annotation) + _bounds(field.metadata),
                default=field.get_default(call_default_factory=True),
                doc=field.description or "",
            )


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    return _section(field.annotation)


def _section(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_word_choice(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(word, str) for word in get_args(annotation))


def _describe(annotation: Any) -> str:
    kinds = _alternatives(annotation)
    if len(kinds) > 1:
        return " or ".join(_describe(kind) for kind in kinds)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(args[0]) + _bounds(
            [bound for field in args[1:] for bound in getattr(field, "metadata", [field])]
        )
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin is list:
        return f'a list, e.g. ["a", "b"], each {_describe(args[0])}'
    if origin is tuple:
        return f"a list of {len(args)}, each {_describe(args[0])}"
    if origin is dict:
        return "a table of texts" if args[1] is str else "a table of settings"
    return _NAMES[annotation]


def _bounds(metadata: list[Any]) -> str:
    words = []
    for bound in metadata:
        match bound:
            case annotated_types.Gt(gt=limit):
                words.append(f"above {limit}")
            case annotated_types.Ge(ge=limit):
                words.append(f"of at least {limit}")
            case annotated_types.Lt(lt=limit):
                words.append(f"below {limit}")
            case annotated_types.Le(le=limit):
                words.append(f"of at most {limit}")
    return " " + " and ".join(words) if words else ""
