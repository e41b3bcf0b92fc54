"""Arrays on the wire and in the store, as MessagePack extension types: one-dimensional, little-endian.

Plain: the bytes. Runs: [lengths as int32][values], for arrays of few long runs: an action mask, and the
versions of tokens that few weight versions sampled. It saves two fifths of a trajectory's bytes.

Invariant: what cannot be an array of this protocol raises `CodecError`, and nothing is expanded before its
length is known to be right. Called by `buffer.codec` and `buffer.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import numpy as np

_INT32 = np.dtype("<i4")
_PLAIN = {1: _INT32, 2: np.dtype("u1"), 3: np.dtype("<f4")}
_RUNS = {4: _INT32, 5: np.dtype("u1")}
_PLAIN_CODES = {dtype: code for code, dtype in _PLAIN.items()}
_RUNS_CODES = {dtype: code for code, dtype in _RUNS.items()}


class CodecError(ValueError):
    """Bytes that are not a valid message. `reason` is the short name under which it is counted."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Runs:
    """An array that is not expanded yet: `values[i]` stands `lengths[i]` times."""

    values: np.ndarray
    lengths: np.ndarray

    def expand(self, length: int) -> np.ndarray:
        """The array, if it is `length` long. Raises CodecError."""
        lengths = self.lengths.tolist()  # few, so a list is faster than numpy
        if sum(lengths) != length or min(lengths, default=1) < 1:
            raise CodecError("length", f"runs of {sum(lengths)} items, where {length} are wanted")
        return np.repeat(self.values, self.lengths)


def pack(array: np.ndarray) -> msgpack.ExtType:
    """The array as it is. Raises CodecError for another dtype or shape than the protocol's."""
    code = _PLAIN_CODES.get(array.dtype)
    if code is None or array.ndim != 1:
        raise CodecError(
            "dtype",
            f"an array of {array.dtype} {array.shape} cannot be sent; use 1-D int32, uint8 or float32",
        )
    return msgpack.ExtType(code, array.tobytes())


def pack_short(array: np.ndarray) -> msgpack.ExtType:
    """The array as runs where that takes fewer bytes."""
    code = _RUNS_CODES.get(array.dtype)
    if code is None or array.ndim != 1 or not len(array):
        return pack(array)
    bounds = _run_bounds(array)
    if (len(bounds) - 1) * (_INT32.itemsize + array.itemsize) >= array.nbytes:
        return pack(array)
    lengths = (bounds[1:] - bounds[:-1]).astype(_INT32)
    return msgpack.ExtType(code, lengths.tobytes() + array[bounds[:-1]].tobytes())


def _run_bounds(array: np.ndarray) -> np.ndarray:
    """Where each run starts, and the end."""
    changes = (array[1:] != array[:-1]).nonzero()[0]
    bounds = np.empty(len(changes) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(array)
    np.add(changes, 1, out=bounds[1:-1])
    return bounds


def unpack(code: int, data: bytes) -> np.ndarray | Runs:
    """msgpack's hook for extension types: a read-only view of `data`. Raises CodecError."""
    dtype = _PLAIN.get(code)
    if dtype is not None:
        _refuse_partial(data, dtype.itemsize, dtype)
        return np.frombuffer(data, dtype)
    dtype = _RUNS.get(code)
    if dtype is None:
        raise CodecError("dtype", f"extension type {code} is no array of this protocol")
    _refuse_partial(data, _INT32.itemsize + dtype.itemsize, dtype)
    runs = len(data) // (_INT32.itemsize + dtype.itemsize)
    lengths = np.frombuffer(data, _INT32, runs)
    return Runs(np.frombuffer(data, dtype, runs, runs * _INT32.itemsize), lengths)


def _refuse_partial(data: bytes, item_bytes: int, dtype: np.dtype) -> None:
    if len(data) % item_bytes:
        raise CodecError("length", f"an array of {len(data)} bytes is no whole number of {dtype}")
