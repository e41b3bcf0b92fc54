"""Raw MessagePack values to the dataclasses of `buffer.messages`, every field checked.

The checks are compiled once from the dataclasses' annotations. Invariant: what `MESSAGES` and
`make_trajectory` return satisfies the types and array promises of `buffer.messages`; anything else raises
`CodecError`, which names the field. Called by `buffer.codec`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np

from buffer import messages
from buffer.arrays import CodecError, Runs
from buffer.messages import PutTrajectory, StopReason, Trajectory, Turn

MAX_DEPTH = 8  # of plain data inside a message, e.g. a tool call's record
_ARRAY_FIELDS = {"token_ids": "<i4", "action_mask": "u1", "logprobs": "<f4", "versions": "<i4"}
_STOP_REASONS = frozenset(reason.value for reason in StopReason)
_MAX_INT = 2**62  # SQLite holds 64 bits; sums of two still fit

Check = Callable[[Any], Any]  # a raw value to the checked one, or CodecError


@dataclass(frozen=True)
class Packed:
    """A trajectory in its encoded form. `trajectory` is None where nobody has decoded it."""

    payload: bytes
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class ReceivedPut(PutTrajectory):
    """A PutTrajectory from the wire, with the bytes of its trajectory as they came: the store keeps them."""

    payload: bytes


# --- values -----------------------------------------------------------------------------------------


def _field_error(expected: str, value: Any) -> NoReturn:
    raise CodecError("field", f"expected {expected}, got {type(value).__name__} {value!r:.60}")


def _check_int(value: Any) -> int:
    if type(value) is int and -_MAX_INT < value < _MAX_INT:
        return value
    return _field_error("an integer below 2^62", value)


def _check_float(value: Any) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is int else _field_error("a number", value)


def _check_str(value: Any) -> str:
    return value if type(value) is str else _field_error("a string", value)


def _check_bool(value: Any) -> bool:
    return value if type(value) is bool else _field_error("true or false", value)


def _check_plain(value: Any, depth: int = 0) -> Any:
    """Plain data of any shape: what tools and tasks attach to a call's record."""
    if depth > MAX_DEPTH:
        raise CodecError("field", f"plain data is nested deeper than {MAX_DEPTH}")
    if type(value) is dict:
        return {_check_str(key): _check_plain(item, depth + 1) for key, item in value.items()}
    if type(value) is list:
        return [_check_plain(item, depth + 1) for item in value]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return _field_error("plain data", value)


def _check_packed(value: Any) -> Trajectory:
    return _packed(value).trajectory  # type: ignore[return-value]


def _packed(value: Any) -> Packed:
    return value if type(value) is Packed else _field_error("a trajectory", value)


# --- compiling annotations --------------------------------------------------------------------------

_LEAVES: dict[Any, Check] = {
    int: _check_int, float: _check_float, str: _check_str, bool: _check_bool, Any: _check_plain,
    Trajectory: _check_packed,
}  # fmt: skip


def _compile(hint: Any) -> Check:
    """The check of one annotation."""
    if hint in _LEAVES:
        return _LEAVES[hint]
    if dataclasses.is_dataclass(hint):
        return _compile_dataclass(hint)  # type: ignore[arg-type]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (_compile(arg) for arg in args if arg is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _compile_tuple(args)
    if origin is dict:
        return _compile_dict(_compile(args[1]))
    raise TypeError(f"the codec has no rule for {hint}")


def _compile_tuple(args: tuple[Any, ...]) -> Check:
    if args[-1] is Ellipsis:
        inner = _compile(args[0])

        def check_all(value: Any) -> tuple[Any, ...]:
            return tuple(map(inner, value)) if type(value) is list else _field_error("an array", value)

        return check_all
    parts = tuple(_compile(arg) for arg in args)

    def check_each(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(parts):
            _field_error(f"an array of {len(parts)}", value)
        return tuple(check(item) for check, item in zip(parts, value, strict=True))

    return check_each


def _compile_dict(inner: Check) -> Check:
    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            _field_error("a map", value)
        return {_check_str(key): inner(item) for key, item in value.items()}

    return check


def _compile_dataclass(cls: type) -> Check:
    checks = {
        name: _compile_array(name) if hint is np.ndarray else _compile(hint)
        for name, hint in get_type_hints(cls).items()
    }
    items = tuple(checks.items())

    def make(value: Any) -> Any:
        if type(value) is not dict or value.keys() != checks.keys():
            given = sorted(map(str, value)) if type(value) is dict else type(value).__name__
            raise CodecError(
                "field", f"{cls.__name__} takes the fields {', '.join(checks)}, got {given!s:.200}"
            )
        try:
            return cls(*[check(value[name]) for name, check in items])
        except CodecError:
            _name_the_field(items, value)
            raise

    return make


def _name_the_field(items: tuple[tuple[str, Check], ...], value: dict[str, Any]) -> None:
    """Check once more, and say which field is wrong."""
    for name, check in items:
        try:
            check(value[name])
        except CodecError as error:
            raise CodecError(error.reason, f"{name}: {error}") from None


def _compile_array(name: str) -> Check:
    dtype = np.dtype(_ARRAY_FIELDS[name])

    def check(value: Any) -> np.ndarray:
        if type(value) is np.ndarray and value.dtype == dtype:
            return value
        kind = value.dtype if type(value) is np.ndarray else type(value).__name__
        raise CodecError("dtype", f"expected an array of {dtype}, got {kind}")

    return check


# --- what a trajectory's fields promise together ----------------------------------------------------


def make_trajectory(fields: Any) -> Trajectory:
    """The trajectory with these raw fields. Raises CodecError."""
    _expand_runs(fields)
    trajectory = _MAKE_FIELDS(fields)
    num_tokens = len(trajectory.token_ids)
    _check_arrays(trajectory, num_tokens)
    for turn in trajectory.turns:
        _check_turn(turn, num_tokens)
    if trajectory.trajectory_id != f"{trajectory.group_id}/{trajectory.index}":
        raise CodecError("field", f"trajectory_id {trajectory.trajectory_id!r:.80} is not group_id/index")
    if trajectory.stop_reason not in _STOP_REASONS:
        raise CodecError(
            "field", f"stop_reason {trajectory.stop_reason!r:.40} is none of {sorted(_STOP_REASONS)}"
        )
    if trajectory.reward is not None and not isfinite(trajectory.reward):
        raise CodecError(
            "field", f"reward {trajectory.reward} is not finite; an unscorable trajectory has none"
        )
    return trajectory


def _expand_runs(fields: Any) -> None:
    """Runs to arrays as long as the tokens; a wrong type of `fields` or tokens is found by the checks."""
    if type(fields) is not dict:
        return
    tokens = fields.get("token_ids")
    for name, value in fields.items():
        if type(value) is Runs and type(tokens) is np.ndarray:
            fields[name] = value.expand(len(tokens))


def _check_arrays(trajectory: Trajectory, num_tokens: int) -> None:
    mask, prompt_len = trajectory.action_mask, trajectory.prompt_len
    if not len(mask) == len(trajectory.logprobs) == len(trajectory.versions) == num_tokens:
        lengths = {name: len(getattr(trajectory, name)) for name in _ARRAY_FIELDS}
        raise CodecError("length", f"the arrays of a trajectory must be equally long, got {lengths}")
    if not 0 <= prompt_len <= num_tokens:
        raise CodecError("length", f"prompt_len {prompt_len} is outside 0 .. {num_tokens}")
    if num_tokens and mask.max() > 1:
        raise CodecError("field", "action_mask holds something other than 0 and 1")
    if mask[:prompt_len].any():
        raise CodecError("field", "action_mask is 1 inside the prompt")


def _check_turn(turn: Turn, num_tokens: int) -> None:
    if not 0 <= turn.start <= turn.end <= turn.observation_end <= num_tokens:
        raise CodecError(
            "length",
            f"turn {turn.start}..{turn.end}..{turn.observation_end} does not lie within {num_tokens} tokens",
        )


def _make_put(fields: Any) -> ReceivedPut:
    trajectory = _MAKE_PUT(fields).trajectory
    return ReceivedPut(trajectory, fields["trajectory"].payload)


_MAKE_FIELDS = _compile_dataclass(Trajectory)
_MAKE_PUT = _compile_dataclass(PutTrajectory)
_NOT_MESSAGES = {"Turn", "Trajectory", "Lease", "Batch", "RoleStatus"}  # only ever parts of messages
MESSAGES: dict[str, Check] = {
    name: _compile_dataclass(cls)
    for name, cls in vars(messages).items()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type) and name not in _NOT_MESSAGES
} | {"PutTrajectory": _make_put}
