"""Throw garbage at the buffer's socket: how many frames, how many refused and why, how many crashes.

    python benchmarks/fuzz.py [--frames 1000000] [--seed 0]

A real buffer process and a sender that has the run's key, so that nothing stops the frames before they are
decoded: noise, damaged messages, cut ones, wrong numbers of parts, and whole messages with one field replaced
by something of another type or size. Strangers without the key send raw bytes to the same port. All along, an
honest client must get its answers, and the ledger must balance.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import msgpack
import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from buffer import server
from buffer.client import BufferClient
from buffer.codec import encode
from buffer.messages import (
    AnnouncePublisher,
    Checkpointed,
    CommitStep,
    Drain,
    GetBatch,
    Heartbeat,
    Hello,
    LeaseRequest,
    PutTrajectory,
    Resume,
    ReturnLeases,
    Scale,
    Status,
    Trajectory,
    Turn,
)
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from metrics import names

CALL_S = 120.0
IN_FLIGHT = 200  # frames sent before replies are read
STRANGERS_EVERY = 1000  # frames
_TRAJECTORY = Trajectory(
    trajectory_id="0-1/0",
    group_id="0-1",
    index=0,
    lease_id="0-1.1",
    actor="actor-0",
    task="fuzz",
    prompt_index=1,
    prompt_len=3,
    token_ids=np.arange(40, dtype="<i4"),
    action_mask=np.repeat(np.array([0, 1], "u1"), [3, 37]),
    logprobs=np.zeros(40, "<f4"),
    versions=np.repeat(np.array([-1, 0], "<i4"), [3, 37]),
    turns=(Turn(3, 40, 40, "stop", ({"name": "search", "outcome": "ok"},)),),
    stop_reason="answer",
    reward=1.0,
)
_MESSAGES = [
    Hello("actor", "actor-0"),
    LeaseRequest("actor-0", 1, 0),
    Heartbeat("actor", "actor-0", ("0-1.1",), 0, "running", {"m": 1.0}),
    ReturnLeases("actor-0", ("0-1.1",)),
    PutTrajectory(_TRAJECTORY),
    GetBatch(1, 0.0),
    CommitStep(1, 1),
    Checkpointed(1, 0),
    Resume(0, 0),
    AnnouncePublisher("tcp://127.0.0.1:1"),
    Drain(("actor-1",)),
    Scale(1),
    Status(2**61),
]
_FRAMES = [encode(message) for message in _MESSAGES]
_VALUES = [
    None, True, -1, 0, 2**62, 2**63, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 300, b"\x00" * 40,
    [], [None], {}, {"a": {"b": [1]}}, msgpack.ExtType(1, bytes(7)), msgpack.ExtType(4, bytes(8)),
    msgpack.ExtType(16, b"\xc1"), msgpack.ExtType(99, b""),
]  # fmt: skip


def garbage(rng: random.Random) -> tuple[bytes, ...]:
    """The parts of one request."""
    kind = rng.randrange(5)
    if kind == 0:
        return tuple(rng.randbytes(rng.randrange(80)) for _ in range(rng.randrange(1, 5)))
    if kind == 1:
        return rng.randbytes(8), rng.randbytes(rng.randrange(400))
    frame = bytearray(rng.choice(_FRAMES))
    if kind == 2:
        return rng.randbytes(8), bytes(frame[: rng.randrange(len(frame))])
    if kind == 3:
        for _ in range(rng.randrange(1, 6)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return rng.randbytes(8), bytes(frame)
    return rng.randbytes(8), replaced(rng, bytes(frame))


def replaced(rng: random.Random, frame: bytes) -> bytes:
    """A well-formed message of which one field, at any depth, has another value."""
    version, name, fields = msgpack.unpackb(frame)
    if name == "PutTrajectory":
        inner = msgpack.unpackb(fields["trajectory"].data)
        inner[rng.choice(list(inner))] = rng.choice(_VALUES)
        fields["trajectory"] = msgpack.ExtType(16, msgpack.packb(inner) or b"")
    elif fields:
        fields[rng.choice(list(fields))] = rng.choice(_VALUES)
    return msgpack.packb([version, name, fields]) or b""


@dataclass
class Result:
    frames: int = 0
    strangers: int = 0  # connections without a key
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason, as the buffer counted them
    honest: int = 0  # answers that an honest client got meanwhile
    crashes: int = 0
    balanced: bool = False
    seconds: float = 0.0


class Attack:
    """A sender with the run's key, and its replies."""

    def __init__(self, spec: RoleSpec, seed: int) -> None:
        keys = RunFolder(spec.run_dir).read_keys()
        self._rng = random.Random(seed)
        self._port = int(spec.buffer_endpoint.rpartition(":")[2])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey = keys.client_public
        self._socket.curve_secretkey = keys.client_secret
        self._socket.connect(spec.buffer_endpoint)

    def send(self, count: int) -> int:
        """So many frames, then the replies that come. Returns how many there were."""
        for _ in range(count):
            self._socket.send_multipart(garbage(self._rng))
        # The last request is an honest one: when it is answered, all before it were read.
        marker = self._rng.randbytes(16)
        self._socket.send_multipart([marker, encode(Status(2**61))])
        replies = 0
        while self._socket.poll(int(CALL_S * 1000)):
            replies += 1
            if self._socket.recv_multipart()[0] == marker:
                return replies - 1
        raise TimeoutError(f"the buffer has not answered for {CALL_S:.0f} s")

    def as_a_stranger(self) -> None:
        """Raw bytes on the port, as a port scanner or a browser would send."""
        with socket.create_connection(("127.0.0.1", self._port), CALL_S) as raw:
            raw.sendall(self._rng.choice([b"GET / HTTP/1.1\r\n\r\n", self._rng.randbytes(200), b"\xff" * 64]))

    def close(self) -> None:
        self._context.destroy(linger=0)


def fuzz(spec: RoleSpec, frames: int, seed: int, most_s: float = inf) -> Result:
    """Start the buffer of `spec` and send `frames` frames of garbage to it, for at most `most_s`."""
    process = multiprocessing.get_context("spawn").Process(target=server.main, args=(spec,), daemon=True)
    process.start()
    result, started, seen = Result(), time.monotonic(), 0
    honest = BufferClient(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "launcher", "honest")
    attack = Attack(spec, seed)
    try:
        with closing(honest), closing(attack):
            while result.frames < frames and time.monotonic() < started + most_s:
                count = min(IN_FLIGHT, frames - result.frames)
                result.answered += attack.send(count)
                result.frames += count
                if result.frames // STRANGERS_EVERY > result.strangers:
                    attack.as_a_stranger()
                    result.strangers += 1
                seen = _look(honest, seen, result)[0]
            ended, reported_at = time.time(), 0.0
            while reported_at <= ended and time.time() < ended + CALL_S:
                seen, reported_at = _look(honest, seen, result)
            result.balanced = honest.call(Status(2**61), CALL_S).balanced
    except (TimeoutError, OSError):
        result.crashes += not process.is_alive()
        if process.is_alive():
            raise
    finally:
        result.crashes += not process.is_alive() and not result.crashes
        process.kill()
        process.join(CALL_S)
    result.seconds = time.monotonic() - started
    return result


def _look(honest: BufferClient, seen: int, result: Result) -> tuple[int, float]:
    """Ask as an honest client, and add what the buffer has refused since report `seen`.

    Returns the number of the last report, and when the buffer made its own last one.
    """
    prefix, reported_at = f"{names.BUFFER_REFUSED}/", 0.0
    for number, role, _, when, metrics in honest.call(Status(seen), CALL_S).reports:
        seen = max(seen, number)
        if role == "buffer":
            reported_at = when
            for name, count in metrics.items():
                if name.startswith(prefix):
                    result.refused[name.removeprefix(prefix)] += int(count)
    result.honest += 1
    return seen, reported_at


def table(result: Result) -> Table:
    per_s = result.frames / result.seconds
    shown = Table("fuzz", "measured", title=f"{result.frames:,} frames in {result.seconds:.0f} s")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.refused.most_common())
    for what, value in (
        ("frames a second", f"{per_s:,.0f}"),
        ("answered", f"{result.answered:,}"),
        ("refused, by reason", reasons),
        ("connections without a key", f"{result.strangers:,}"),
        ("answers to an honest client", f"{result.honest:,}"),
        ("ledger balanced", "yes" if result.balanced else "NO"),
        ("crashes", str(result.crashes)),
    ):
        shown.add_row(what, value)
    return shown


def main() -> None:
    from benchmarks.buffer import buffer_spec

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=inf, help="stop then, with fewer frames")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(buffer_spec(Path(folder), 512), options.frames, options.seed, options.seconds)
    Console().print(table(result))
    sys.exit(0 if result.balanced and not result.crashes else 1)


if __name__ == "__main__":
    main()
