"""The control messages between the publisher and its receivers, and their encoding.

Weights never travel here: these messages say who joins which process group, when to swap, and how it
went. Every body is MessagePack of `[type, field, ...]`; `decode` checks the type's name, the number of
fields and each field's type, so that a stranger's or an older peer's message is one clear error.
Used by `weightsync.publisher`, `weightsync.coordinator` and `weightsync.receiver`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

PROTOCOL = 3
MAX_MESSAGE_BYTES = 64 << 20  # a manifest of 100,000 tensors is about 10 MB

TensorMeta = tuple[str, str, tuple[int, ...]]  # name, torch dtype name, shape


class WireError(ValueError):
    """A message that cannot be understood. The text says what was wrong with it."""


# --- receiver to publisher ------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Ask to be sent weights. Repeated until `Welcome` comes."""

    name: str  # the actor's; a newer join of the same name replaces an older one
    devices: tuple[str, ...]  # of the engine's workers in rank order, named by `transport.device_name`
    source: str  # the publisher run whose weights are loaded; "" at first
    version: int  # the version loaded
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Alive:
    """Sent every second, whatever else goes on. Of the publisher, to those who take part in a transfer."""


@dataclass(frozen=True)
class Loaded:
    """The engine serves the weights of `transfer`."""

    transfer: int
    version: int
    pause_s: float  # generation stood still for so long


@dataclass(frozen=True)
class Failed:
    """The receiver has let go of `transfer` and serves its previous weights."""

    transfer: int
    reason: str


@dataclass(frozen=True)
class Leave:
    """The receiver ends."""


# --- publisher to receiver ------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """One member's place in a process group for weight bytes. Rank 0 is the publisher."""

    backend: str  # "gloo", "nccl", "shm" or "disk"
    host: str  # of the publisher's TCPStore
    port: int
    name: str  # prefix in the store; a name is used for one group only
    rank: int
    world: int
    timeout_s: float  # of the rendezvous and of every broadcast
    folder: str = ""  # of the disk backend's files


@dataclass(frozen=True)
class Welcome:
    """Answer to `Join`: what every transfer of this publisher holds."""

    source: str  # this publisher run
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int


@dataclass(frozen=True)
class Begin:
    """Join `group` and stage the bytes that rank 0 broadcasts. The rank is that of the engine's worker 0."""

    transfer: int
    group: GroupSpec


@dataclass(frozen=True)
class Probe:
    """A sequence, and what the learner's model says of it: the engine must say the same."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of each token but the first, given those before it; temperature 1


NO_PROBE = Probe()


@dataclass(frozen=True)
class Commit:
    """All bytes were sent: compare the checksum, then swap them in, then ask the engine for the probe."""

    transfer: int
    version: int
    checksum: int
    probe: Probe = NO_PROBE


@dataclass(frozen=True)
class Abort:
    """Let go of the transfer, discard what is staged and answer `Failed`."""

    transfer: int
    reason: str


@dataclass(frozen=True)
class Dropped:
    """You are not, or no longer, a member: join again."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Joining again will not help; `reason` says what will."""

    reason: str


Message = Join | Alive | Loaded | Failed | Leave | Welcome | Begin | Commit | Abort | Dropped | Refused
_TYPES: dict[str, type] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    return msgpack.Packer().pack([type(message).__name__, *_plain(message)])


def decode(body: bytes) -> Message:
    """Raises `WireError`."""
    try:
        parts = msgpack.unpackb(body, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not MessagePack: {error}") from error
    if not isinstance(parts, tuple) or not parts or parts[0] not in _TYPES:
        raise WireError(f"not a weightsync message: {str(parts)[:80]}")
    return _build(_TYPES[parts[0]], parts[1:], parts[0])


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def _build(cls: type, values: Any, where: str) -> Any:
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    if not isinstance(values, tuple) or len(values) != len(fields):
        raise WireError(
            f"{where} has {len(fields)} fields, this one does not; are both sides the same release?"
        )
    return cls(
        *(
            _checked(value, hints[field.name], f"{where}.{field.name}")
            for field, value in zip(fields, values, strict=True)
        )
    )


def _checked(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if get_origin(hint) is tuple:
        return _checked_tuple(value, get_args(hint), where)
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise WireError(f"{where} must be {hint.__name__}, got {type(value).__name__}")
    return value


def _checked_tuple(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise WireError(f"{where} must be a list, got {type(value).__name__}")
    if len(hints) == 2 and isinstance(hints[1], types.EllipsisType):
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        raise WireError(f"{where} must have {len(hints)} items, got {len(value)}")
    return tuple(_checked(item, hint, where) for item, hint in zip(value, hints, strict=True))
