"""`module:object` references in a config file, importable from the config's folder too.

Invariant: what comes back is the object of the folder's own file, never a namesake from elsewhere.
Called by `toolcall.registry.load_tools` and `tasks.loading`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class BadReference(ValueError):
    """A `module:object` text that cannot be followed."""


def import_object(reference: str, folder: Path | None = None) -> Any:
    """The object that `module:object` names; `folder` is on `sys.path` while the module is imported.

    Raises BadReference with the mend. An exception inside the module itself is its cause.
    """
    module_name, colon, path = reference.partition(":")
    if not (colon and module_name and path):
        raise BadReference(f"{reference!r} is not a reference; write module:object, as in my_task:search")
    found: Any = _import_module(module_name, reference, folder)
    for name in path.split("."):
        if not hasattr(found, name):
            public = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))) or "nothing"
            raise BadReference(f"{reference!r}: {module_name} has no {name!r}; it has: {public}")
        found = getattr(found, name)
    return found


def _import_module(name: str, reference: str, folder: Path | None) -> ModuleType:
    with _searched_first(folder):
        try:
            module = importlib.import_module(name)
        except Exception as error:
            raise BadReference(
                f"{reference!r}: importing {name} failed: {type(error).__name__}: {error}"
            ) from error
    _refuse_namesake(module, reference, folder)
    return module


@contextmanager
def _searched_first(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)


def _refuse_namesake(module: ModuleType, reference: str, folder: Path | None) -> None:
    """A module of the same name imported earlier wins over the folder's; that must not pass unseen."""
    if folder is None:
        return
    wanted = folder.resolve() / (module.__name__.replace(".", "/") + ".py")
    actual = getattr(module, "__file__", None)
    if wanted.exists() and actual is not None and Path(actual).resolve() != wanted:
        raise BadReference(
            f"{reference!r}: a module {module.__name__!r} is already loaded from {actual}; "
            f"rename {wanted.name}"
        )
