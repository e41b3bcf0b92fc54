"""A buffer served from a thread of the test, and raw sockets to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from buffer import server
from buffer.client import BufferClient
from buffer.codec import decode
from configs.roles import RoleSpec
from configs.run_folder import CurveKeys, RunFolder
from configs.schema import RunConfig

TIMEOUT_S = 60.0  # a busy machine gives a thread its turn late


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def buffer_spec(run_dir: Path, run_config: RunConfig, num_prompts: int = 1000) -> RoleSpec:
    RunFolder(run_dir).create_keys()
    return RoleSpec(
        role="buffer",
        name="buffer",
        rank=0,
        world=1,
        config=run_config,
        run_dir=run_dir,
        run_id="run",
        config_dir=run_dir,
        model_path=run_dir,
        num_prompts=num_prompts,
        buffer_endpoint=free_endpoint(),
        device="cpu",
        threads=1,
    )


@contextmanager
def serving(spec: RoleSpec) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(spec, stop), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@contextmanager
def client(spec: RoleSpec, role: str = "learner", keys: CurveKeys | None = None) -> Iterator[BufferClient]:
    connected = BufferClient(spec.buffer_endpoint, keys or RunFolder(spec.run_dir).read_keys(), role, "test")
    try:
        yield connected
    finally:
        connected.close()


class Raw:
    """A DEALER that sends whatever parts it is told."""

    def __init__(self, spec: RoleSpec) -> None:
        keys = RunFolder(spec.run_dir).read_keys()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey = keys.client_public
        self._socket.curve_secretkey = keys.client_secret
        self._socket.connect(spec.buffer_endpoint)

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def receive(self) -> tuple[bytes, Any]:
        """(request id, reply)."""
        assert self._socket.poll(int(TIMEOUT_S * 1000)), "no reply"
        request_id, body = self._socket.recv_multipart()
        return request_id, decode(body)

    def close(self) -> None:
        self._context.destroy(linger=0)
