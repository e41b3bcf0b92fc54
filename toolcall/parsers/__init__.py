"""The call syntaxes. `make_parser` is how configs, tasks and users name one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolcall.parsers.deepseek import DeepSeekParser
from toolcall.parsers.fenced_python import FencedPythonParser
from toolcall.parsers.hermes import HermesParser
from toolcall.parsers.llama3_json import Llama3JsonParser
from toolcall.parsers.mistral import MistralParser
from toolcall.parsers.pythonic import PythonicParser
from toolcall.parsers.qwen3_coder import Qwen3CoderParser
from toolcall.parsers.tag import TagParser
from toolcall.types import Parser

PARSERS: dict[str, Callable[..., Parser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "tag": TagParser,
    "fenced_python": FencedPythonParser,
}
MESSAGE_SYNTAXES = ("hermes", "qwen3_coder", "mistral", "deepseek", "pythonic", "llama3_json")
"""Those whose results are tool messages; the ones that need no tag of their own come last."""
AUTO = "auto"

__all__ = ["AUTO", "MESSAGE_SYNTAXES", "PARSERS", "make_parser"]


def make_parser(name: str, schemas: Sequence[Mapping[str, Any]] = (), **options: Any) -> Parser:
    """The parser of that name. `schemas`: the tools' schemas, for syntaxes that need names or types.

    Raises ValueError with the names there are, or with the option at fault.
    """
    if name not in PARSERS:
        raise ValueError(f"there is no parser {name!r}; choose one of: {', '.join((AUTO, *PARSERS))}")
    accepted = [key for key in inspect.signature(PARSERS[name]).parameters if key != "schemas"]
    for option in options:
        if option not in accepted:
            known = ", ".join(accepted) or "none"
            raise ValueError(f"parser {name!r} has no option {option!r}; it takes: {known}")
    if name in MESSAGE_SYNTAXES:
        options = {"schemas": schemas, **options}
    try:
        return PARSERS[name](**options)
    except TypeError as error:
        raise ValueError(f"parser {name!r}: {error}") from error
