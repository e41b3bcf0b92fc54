"""Messages to MessagePack and back. No pickle, no code in the data.

A frame is the array [protocol version, message name, {field: value}]. Arrays travel as extension types
(`buffer.arrays`); a trajectory travels as an extension type that holds its own MessagePack map, so that its
bytes are stored as they came and spliced into a batch as they were stored.

Invariant: `decode(encode(m))` equals `m`, and whatever `decode` returns has been checked (`buffer.checks`).
Anything else raises `CodecError`. Called by client, server and store.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, cast

import msgpack
import numpy as np

from buffer import arrays
from buffer.arrays import CodecError, Runs
from buffer.checks import MESSAGES, Packed, ReceivedPut, make_trajectory
from buffer.messages import PROTOCOL_VERSION, Trajectory

__all__ = [
    "CodecError", "Packed", "ReceivedPut", "decode", "decode_trajectory", "encode", "encode_trajectory"
]  # fmt: skip

_TRAJECTORY_EXT = 16
_PACK_BYTES = 32_768  # msgpack's default of 1 MiB costs more in page faults than a message in packing


# --- encoding ---------------------------------------------------------------------------------------


def encode(message: Any) -> bytes:
    """One frame. Raises CodecError if an array has another dtype or shape than the protocol allows."""
    return _pack((PROTOCOL_VERSION, type(message).__name__, vars(message)))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The payload that the store keeps for one trajectory."""
    fields = vars(trajectory).copy()
    for name in ("action_mask", "versions"):
        fields[name] = arrays.pack_short(fields[name])
    return _pack(fields)


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value, default=_plain, buf_size=_PACK_BYTES))


def _plain(value: Any) -> Any:
    """msgpack's hook: what it cannot pack by itself, as something that it can."""
    if isinstance(value, np.ndarray):
        return arrays.pack(value)
    if isinstance(value, Trajectory):
        return msgpack.ExtType(_TRAJECTORY_EXT, encode_trajectory(value))
    if isinstance(value, Packed):
        return msgpack.ExtType(_TRAJECTORY_EXT, value.payload)
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, np.generic):
        return value.item()
    raise CodecError("field", f"a {type(value).__name__} cannot be sent; use plain data")


# --- decoding ---------------------------------------------------------------------------------------


def decode(data: bytes, max_bytes: int = sys.maxsize) -> Any:
    """The message in one frame; a PutTrajectory comes as `ReceivedPut`. Raises CodecError.

    Arrays may be read-only views of the frame.
    """
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
    check = MESSAGES.get(name) if type(name) is str else None
    if check is None:
        raise CodecError("unknown_type", f"there is no message named {name!r:.60}")
    return check(fields)


def decode_trajectory(payload: bytes) -> Trajectory:
    """A trajectory from the store's `payload` column, or from a message. Raises CodecError."""
    return make_trajectory(_unpack(payload))


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=_from_ext)
    except CodecError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError("msgpack", f"the bytes are not valid MessagePack: {error!s:.120}") from error


def _from_ext(code: int, data: bytes) -> np.ndarray | Runs | Packed:
    if code == _TRAJECTORY_EXT:
        return Packed(data, decode_trajectory(data))
    return arrays.unpack(code, data)
