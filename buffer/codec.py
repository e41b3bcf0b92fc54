"""Messages to MessagePack and back, every field checked. No pickle, no code in the data.

A frame is the array [protocol version, message name, {field: value}]. Arrays travel as MessagePack
extension types, one per dtype, holding little-endian bytes; a trajectory travels as an extension type that
holds its own MessagePack map, so that the stored payload is spliced into a batch without a second encoding.

Invariant: `decode(encode(m))` equals `m`; what `decode` returns satisfies the types and the array
invariants of `buffer.messages`; anything else raises `CodecError`. Called by client, server and store.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from buffer import messages
from buffer.messages import PROTOCOL_VERSION, StopReason, Trajectory, Turn

MAX_DEPTH = 8  # of plain data inside a message, e.g. a tool call's record
_TRAJECTORY_EXT = 16
_PACK_BYTES = 32_768  # msgpack's default of 1 MiB costs more in page faults than a message in packing
_DTYPES = {1: np.dtype("<i4"), 2: np.dtype("u1"), 3: np.dtype("<f4")}
_EXTS = {dtype: code for code, dtype in _DTYPES.items()}
_ARRAY_FIELDS = {"token_ids": "<i4", "action_mask": "u1", "logprobs": "<f4", "versions": "<i4"}
_STOP_REASONS = frozenset(reason.value for reason in StopReason)
_MAX_INT = 2**62  # SQLite holds 64 bits; sums of two still fit

Check = Callable[[Any], Any]  # a raw value to the checked one, or CodecError


class CodecError(ValueError):
    """A frame that is not a valid message. `reason` is the short name under which it is counted."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Packed:
    """A trajectory that is already encoded; `encode` accepts it where a `Trajectory` stands."""

    payload: bytes


# --- encoding ---------------------------------------------------------------------------------------


def encode(message: Any) -> bytes:
    """One frame. Raises CodecError if an array has another dtype or shape than the protocol allows."""
    return _pack((PROTOCOL_VERSION, type(message).__name__, vars(message)))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The payload that the store keeps for one trajectory."""
    return _pack(vars(trajectory))


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value, default=_plain, buf_size=_PACK_BYTES))


def _plain(value: Any) -> Any:
    """msgpack's hook: what it cannot pack by itself, as something that it can."""
    if isinstance(value, np.ndarray):
        return _pack_array(value)
    if isinstance(value, Trajectory):
        return msgpack.ExtType(_TRAJECTORY_EXT, encode_trajectory(value))
    if isinstance(value, Packed):
        return msgpack.ExtType(_TRAJECTORY_EXT, value.payload)
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, np.generic):
        return value.item()
    raise CodecError("field", f"a {type(value).__name__} cannot be sent; use plain data")


def _pack_array(array: np.ndarray) -> msgpack.ExtType:
    code = _EXTS.get(array.dtype)
    if code is None or array.ndim != 1:
        raise CodecError(
            "dtype",
            f"an array of {array.dtype} {array.shape} cannot be sent; use 1-D int32, uint8 or float32",
        )
    return msgpack.ExtType(code, array.tobytes())


# --- decoding ---------------------------------------------------------------------------------------


def decode(data: bytes, max_bytes: int = sys.maxsize) -> Any:
    """The message in one frame. Arrays are read-only views of the frame. Raises CodecError."""
    if len(data) > max_bytes:
        raise CodecError(
            "oversize",
            f"a message of {len(data):,} bytes exceeds the limit of {max_bytes:,}: raise max_message_mb",
        )
    frame = _unpack(data)
    if type(frame) is not list or len(frame) != 3:
        raise CodecError("msgpack", "a message must be [protocol version, name, fields]")
    version, name, fields = frame
    if version != PROTOCOL_VERSION:
        raise CodecError(
            "version",
            f"protocol version {version!r:.40} is not {PROTOCOL_VERSION}: run the same Slipstream everywhere",
        )
    check = _MESSAGES.get(name) if type(name) is str else None
    if check is None:
        raise CodecError("unknown_type", f"there is no message named {name!r:.60}")
    return check(fields)


def decode_trajectory(payload: bytes) -> Trajectory:
    """A trajectory from the store's `payload` column, or from a message. Raises CodecError."""
    return _make_trajectory(_unpack(payload))


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=_from_ext)
    except CodecError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError("msgpack", f"the bytes are not valid MessagePack: {error!s:.120}") from error


def _from_ext(code: int, data: bytes) -> np.ndarray | Trajectory:
    if code == _TRAJECTORY_EXT:
        return decode_trajectory(data)
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise CodecError("dtype", f"extension type {code} is no array of this protocol")
    if len(data) % dtype.itemsize:
        raise CodecError("length", f"an array of {len(data)} bytes is no whole number of {dtype}")
    return np.frombuffer(data, dtype)


# --- checks, compiled once from the dataclasses' annotations ----------------------------------------


def _field_error(expected: str, value: Any) -> NoReturn:
    raise CodecError("field", f"expected {expected}, got {type(value).__name__} {value!r:.60}")


def _check_int(value: Any) -> int:
    return (
        value
        if type(value) is int and -_MAX_INT < value < _MAX_INT
        else _field_error("an integer below 2^62", value)
    )


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


_LEAVES: dict[Any, Check] = {
    int: _check_int, float: _check_float, str: _check_str, bool: _check_bool, Any: _check_plain
}  # fmt: skip


def _compile(hint: Any) -> Check:
    """The check of one annotation."""
    if hint in _LEAVES:
        return _LEAVES[hint]
    if hint is Trajectory:
        return _check_decoded_trajectory
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
        fields = []
        name = ""
        try:
            for name, check in items:
                fields.append(check(value[name]))
        except CodecError as error:
            raise CodecError(error.reason, f"{name}: {error}") from None
        return cls(*fields)

    return make


def _compile_array(name: str) -> Check:
    dtype = np.dtype(_ARRAY_FIELDS[name])

    def check(value: Any) -> np.ndarray:
        if type(value) is np.ndarray and value.dtype == dtype:
            return value
        kind = value.dtype if type(value) is np.ndarray else type(value).__name__
        raise CodecError("dtype", f"expected an array of {dtype}, got {kind}")

    return check


# --- what a trajectory's fields promise together ----------------------------------------------------


def _check_decoded_trajectory(value: Any) -> Trajectory:
    return value if type(value) is Trajectory else _field_error("a trajectory", value)


def _make_trajectory(fields: Any) -> Trajectory:
    trajectory = _MAKE_FIELDS(fields)
    num_tokens = len(trajectory.token_ids)
    lengths = {name: len(getattr(trajectory, name)) for name in _ARRAY_FIELDS}
    if set(lengths.values()) != {num_tokens}:
        raise CodecError("length", f"the arrays of a trajectory must be equally long, got {lengths}")
    if not 0 <= trajectory.prompt_len <= num_tokens:
        raise CodecError("length", f"prompt_len {trajectory.prompt_len} is outside 0 .. {num_tokens}")
    if num_tokens and trajectory.action_mask.max() > 1:
        raise CodecError("field", "action_mask holds something other than 0 and 1")
    if trajectory.action_mask[: trajectory.prompt_len].any():
        raise CodecError("field", "action_mask is 1 inside the prompt")
    for turn in trajectory.turns:
        _check_turn(turn, num_tokens)
    if trajectory.trajectory_id != f"{trajectory.group_id}/{trajectory.index}":
        raise CodecError("field", f"trajectory_id {trajectory.trajectory_id!r:.80} is not group_id/index")
    if trajectory.stop_reason not in _STOP_REASONS:
        raise CodecError(
            "field", f"stop_reason {trajectory.stop_reason!r:.40} is none of {sorted(_STOP_REASONS)}"
        )
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        raise CodecError(
            "field", f"reward {trajectory.reward} is not finite; an unscorable trajectory has none"
        )
    return trajectory


def _check_turn(turn: Turn, num_tokens: int) -> None:
    if not 0 <= turn.start <= turn.end <= turn.observation_end <= num_tokens:
        raise CodecError(
            "length",
            f"turn {turn.start}..{turn.end}..{turn.observation_end} does not lie within {num_tokens} tokens",
        )


_MAKE_FIELDS = _compile_dataclass(Trajectory)
_NOT_MESSAGES = {"Turn", "Trajectory", "Lease", "Batch", "RoleStatus"}  # only ever parts of messages
_MESSAGES: dict[str, Check] = {
    name: _compile_dataclass(cls)
    for name, cls in vars(messages).items()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type) and name not in _NOT_MESSAGES
}
