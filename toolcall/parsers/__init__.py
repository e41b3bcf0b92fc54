"""The call syntaxes. `make_parser` is how configs, tasks and users name one."""

from __future__ import annotations

from typing import Any

from toolcall.parsers.hermes import HermesParser
from toolcall.parsers.tag import TagParser
from toolcall.types import Parser

PARSERS = {"hermes": HermesParser, "tag": TagParser}

__all__ = ["PARSERS", "HermesParser", "TagParser", "make_parser"]


def make_parser(name: str, **options: Any) -> Parser:
    """The parser of that name. Raises ValueError with the names there are, or with the option at fault."""
    if name not in PARSERS:
        raise ValueError(f"there is no parser {name!r}; choose one of: {', '.join(PARSERS)}")
    try:
        return PARSERS[name](**options)
    except TypeError as error:
        raise ValueError(f"parser {name!r}: {error}") from error
