"""From a TOML file and command-line overrides to a `RunConfig`, and back to TOML.

Invariant: whatever is wrong comes out as one `ConfigError` sentence that names the key, where it
was set and the mend; pydantic's own report never reaches the user. Used by `launcher`, the
evaluator and anyone who reads a recipe or a run folder's resolved config.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from configs.keys import Key, all_keys, entry_keys, find_key, nearest, section_of_entries, sections
from configs.presets import apply_preset
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from configs.without_effect import settings_without_effect

RECIPES = Path(__file__).parent
DEFAULT_RECIPE = RECIPES / "calculator_cpu.toml"
SHORT_NAMES = {
    "actors": "actors.count",
    "learners": "learner.count",
    "steps": "learner.steps",
    "seed": "seed",
    "ray-address": "launch.ray_address",
    "name": "launch.name",
}
"""Options that stand for a dotted key: `--actors 4` is `--actors.count 4`."""

_COMMAND_LINE = "on the command line"


class ConfigError(ValueError):
    """A wrong setting, as one sentence with the mend."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config that can run. User modules and data files are relative to `config_dir`."""

    config: RunConfig
    config_dir: Path
    source: Path
    warnings: tuple[str, ...] = ()  # settings without effect, one sentence each
    overrides: tuple[str, ...] = ()  # as they were given; with `source` they lead to `config` again


def load_config(
    path: Path | None, overrides: Sequence[str] = (), options: Sequence[str] = ()
) -> LoadedConfig:
    """Read `path` (None: the default recipe) and apply overrides such as `["--learner.lr", "2e-6"]`.

    `options` are the calling command's own option names, offered when an override is a mistyped one.
    A config inside a run folder keeps the `config_dir` of the recipe that the run was started from.
    Raises ConfigError.
    """
    source = DEFAULT_RECIPE if path is None else path
    in_file = f"in {source.name}"
    data = _read_toml(source)
    _refuse_unknown(data, in_file)
    overridden = set()
    for name, raw in _pairs(overrides):
        key = _known_name(name, options)
        _set(data, key, _value(key, raw))
        overridden.add(key)
    apply_preset(data)
    config = _build(data, lambda key: _COMMAND_LINE if key in overridden else in_file)
    return LoadedConfig(
        config=config,
        config_dir=RunFolder(source.parent).origin() or source.parent.resolve(),
        source=source,
        warnings=settings_without_effect(config),
        overrides=tuple(overrides),
    )


def dump_toml(config: RunConfig) -> str:
    """The whole config as TOML that `load_config` reads back to an equal config (None is left out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = {recipe.stem: recipe for recipe in sorted(RECIPES.glob("*.toml"))}
        guess = nearest(path.stem, shipped)
        mend = f"did you mean {shipped[guess]}" if guess else f"the shipped recipes are in {RECIPES}"
        raise ConfigError(f"there is no config file {path}; {mend}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _refuse_unknown(
    data: Mapping[str, Any], where: str, model: type[BaseModel] = RunConfig, prefix: str = ""
) -> None:
    for name, value in data.items():
        field = model.model_fields.get(name)
        if field is None:
            raise ConfigError(_unknown(prefix + name, where, ()))
        inner, full = field.annotation, prefix + name
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            _refuse_unknown(_table(value, full, where), where, inner, f"{full}.")
        elif section := section_of_entries(inner):
            for entry, settings in _table(value, full, where).items():
                path = f"{full}.{entry}"
                _refuse_unknown(_table(settings, path, where), where, section, f"{path}.")


def _table(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {where} must be a table, written as [{name}]")
    return value


def _unknown(name: str, where: str, options: Sequence[str]) -> str:
    on_command_line = where == _COMMAND_LINE
    candidates = [*all_keys(), *(SHORT_NAMES if on_command_line else sections()), *options]
    for key in all_keys().values():
        if key.open_ended and name.startswith(key.name + "."):
            candidates += entry_keys(key, name.removeprefix(key.name + ".").partition(".")[0])
    guess = nearest(name, candidates)
    dashes = "--" if on_command_line else ""
    mend = f"did you mean {dashes}{guess}" if guess else "`python launch.py check --keys` lists them all"
    kind = "option" if on_command_line else "key"
    return f"unknown {kind} {dashes}{name} {where}; {mend}"


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """`["--a.b", "1", "--c.d=2", "--e.f"]` as name and raw value; a name without a value is a true flag."""
    pairs: list[tuple[str, str]] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; a setting is written --section.key value")
        name, equals, raw = word[2:].partition("=")
        if not equals:
            has_value = bool(words) and not words[0].startswith("--")
            raw = words.pop(0) if has_value else _flag_value(name)
        pairs.append((name, raw))
    return pairs


def _flag_value(name: str) -> str:
    key = find_key(SHORT_NAMES.get(name, name))
    if key is not None and key.annotation is not bool:
        raise ConfigError(f"--{name} needs a value: {key.wanted}")
    return "true"


def _known_name(name: str, options: Sequence[str]) -> str:
    full = SHORT_NAMES.get(name, name)
    if find_key(full) is None:
        raise ConfigError(_unknown(name, _COMMAND_LINE, options))
    return full


def _value(name: str, raw: str) -> Any:
    """A word of the command line as the value that TOML would have given for the same key."""
    key = find_key(name)
    is_text = key is not None and (key.is_text if key.name == name else key.holds_text)
    if is_text:
        return None if raw.lower() in ("null", "none") and "null" in (key.wanted if key else "") else raw
    if raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return raw


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
    data[last] = value


def _build(data: dict[str, Any], where: Callable[[str], str]) -> RunConfig:
    try:
        # JSON mode: strict about types ("4" is not 4) and yet lists are good for tuples.
        return RunConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        raise ConfigError(first["msg"].removeprefix("Value error, "))
    name, key, value = _culprit([str(part) for part in first["loc"]], data)
    given, doc = json.dumps(value, default=str), key.doc.rstrip(".")
    raise ConfigError(f"{name} = {given} {where(name)} must be {key.wanted} ({doc})")


def _culprit(path: Sequence[str], data: dict[str, Any]) -> tuple[str, Key, Any]:
    """The setting that pydantic's `path` leads to or into: its name, its key and what it was given."""
    name, value, key = "", data, None
    for part in path:
        if key is not None and not section_of_entries(key.annotation):
            break
        name, value = f"{name}.{part}".removeprefix("."), value[part]
        key = find_key(name)
    assert key is not None
    return name, key, value
