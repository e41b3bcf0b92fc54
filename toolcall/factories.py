"""Tools that a function makes from a config's options: `{ use = "module:function", options = { … } }`.

Invariant: the function gets only options that it takes, and a value that it refuses is told with its name.
Called by `toolcall.registry.load_tools`; the shipped functions are in `toolcall.tools`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolcall.errors import BadTool
from toolcall.importing import import_object
from toolcall.options import nearest

_KEYS = ("use", "options")


def make_tools(entry: Mapping[str, Any], folder: Path | None) -> Any:
    """What the entry's function returns. One with a parameter `folder` gets the config's. Raises BadTool."""
    if unknown := next((key for key in entry if key not in _KEYS), None):
        raise BadTool(f"task.tools: {unknown!r} in {dict(entry)}{nearest(unknown, _KEYS)}")
    use, options = entry.get("use"), entry.get("options", {})
    if not isinstance(use, str) or not isinstance(options, Mapping):
        raise BadTool(f'task.tools: {dict(entry)} must be {{ use = "module:function", options = {{…}} }}')
    make = import_object(use, folder)
    if not inspect.isfunction(make):
        if options:
            raise BadTool(f"task.tools: {use!r} is no function that makes a tool, so it takes no options")
        return make
    return _call(make, use, dict(options), folder)


def _call(make: Any, use: str, options: dict[str, Any], folder: Path | None) -> Any:
    parameters = inspect.signature(make).parameters
    names = [name for name in parameters if name != "folder"]
    for name in options:
        if name not in names:
            raise BadTool(f"task.tools: {use!r} takes no option {name!r}{nearest(name, names)}")
    for name in names:
        if name not in options and parameters[name].default is inspect.Parameter.empty:
            raise BadTool(f"task.tools: {use!r} needs the option {name!r}; write options = {{ {name} = … }}")
    if "folder" in parameters:
        options["folder"] = folder
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise BadTool(f"task.tools: {use!r}: {error}") from error
