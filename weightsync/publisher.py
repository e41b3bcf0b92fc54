"""The learner's end: `publish` copies the weights and returns; a thread sends them to every engine.

Invariants: training waits for a copy, never for a receiver; the newest version wins (older ones that
nobody has started to receive are skipped and counted); an error in the thread is raised by the next
`publish` or `wait_idle`. Made by rank 0 of `learner.learner`. `weightsync.coordinator` decides,
`weightsync.sender` sends, this module owns the socket and the clock.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import torch
import zmq

from configs.roles import RoleSpec
from configs.run_folder import CurveKeys, RunFolder
from metrics import names
from weightsync import backends, files, rendezvous, transport
from weightsync.coordinator import Action, CloseGroup, Coordinator, Send, Settings, StartSending
from weightsync.curve import authenticator, secure_server
from weightsync.sender import Crashed, Outcome, Sender, SendFailed, Sent
from weightsync.shared_memory import shared_buffer
from weightsync.snapshot import SnapshotStore
from weightsync.version import Manifest, host_buffer
from weightsync.wire import Message, Probe, Refused, TensorMeta, WireError, decode, encode

TICK_MS = 200
CLOSE_S = 10.0  # for each kind of thread to end
SILENCE_S = 20.0  # many of the receivers' Alive intervals: a busy machine is no dead actor

log = logging.getLogger(__name__)


class Publisher:
    """One per learner run. `endpoint` is what receivers connect to."""

    def __init__(
        self, spec: RoleSpec, metadata: Iterable[tuple[str, str, tuple[int, ...]]], keys: CurveKeys
    ) -> None:
        """`metadata`: name, torch dtype name and shape of every tensor, in the order of `publish`."""
        tensors: tuple[TensorMeta, ...] = tuple(
            (name, dtype, tuple(shape)) for name, dtype, shape in metadata
        )
        manifest = Manifest.of(tensors)
        # The interface towards the buffer is the one that buffer.host chose, whatever node this is.
        host = rendezvous.local_address_towards(urlsplit(spec.buffer_endpoint).hostname or "127.0.0.1")
        config = spec.config.weightsync
        device = transport.current_device(spec.device)
        bucket_bytes = config.bucket_mb << 20
        self._store = rendezvous.serve_store(host, config.timeout_s)  # lives as long as this object
        self._nbytes = manifest.nbytes
        device_name = transport.device_name(device)
        shared = backends.shares_memory(config.backend, device_name)
        self._snapshots = SnapshotStore(manifest, shared_buffer if shared else host_buffer)
        folder = RunFolder(spec.run_dir).weights.absolute()
        if config.backend == "disk":
            files.clear(folder)
        self._sender = Sender(self._snapshots, device, bucket_bytes, self._on_outcome)
        self._coordinator = Coordinator(
            Settings(
                source=f"{spec.run_id}/{secrets.token_hex(4)}",
                tensors=tensors,
                bucket_bytes=bucket_bytes,
                backend=config.backend,
                device=device_name,
                folder=str(folder),
                host=host,
                port=self._store.port,
                timeout_s=config.timeout_s,
                silence_s=min(SILENCE_S, config.timeout_s),
            )
        )
        self._context = zmq.Context()
        self._guard = authenticator(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        secure_server(self._socket, keys)
        self._socket.router_mandatory = True  # a peer that died is an error at the next send, not silence
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._changed = threading.Condition()  # guards what follows
        self._version: int | None = None  # newest published
        self._served: int | None = None  # the version that every member has loaded, if they agree
        self._behind: list[str] = []
        self._bytes = 0
        self._transfer_s = 0.0
        self._pause_s = 0.0
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weightsync-publisher", daemon=True)
        self._thread.start()

    # --- the learner's side ------------------------------------------------------------------------

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        probe: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> None:
        """Copy the weights and return; they are sent while training goes on.

        probe: token ids, and the model's logprobs of all but the first at temperature 1, which every engine
        has to give too once it has loaded the weights.

        Raises ValueError if the tensors are not those announced, and the thread's error if it failed.
        """
        self._raise_failure()
        self._snapshots.write(version, named_tensors, Probe(tuple(probe[0]), tuple(probe[1])))
        with self._changed:
            self._version = version
        self._ring()

    def wait_idle(self, timeout_s: float) -> None:
        """Until every joined receiver serves the newest version; at once if there is no receiver.

        Raises TimeoutError naming those who lack it, and the thread's error if it failed.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._failure is not None or self._served == self._version, timeout_s
            )
            behind = ", ".join(self._behind)
        self._raise_failure()
        if not done:
            raise TimeoutError(
                f"weight version {self._version} was not loaded within {timeout_s:g} s by: {behind}"
            )

    def metrics(self) -> dict[str, float]:
        """Counters since the last call (bytes, versions skipped), longest pause since, last transfer."""
        with self._changed:
            window = {
                names.SYNC_VERSION: float(-1 if self._version is None else self._version),
                names.SYNC_TRANSFER_S: self._transfer_s,
                names.SYNC_PAUSE_S: self._pause_s,
                names.SYNC_BYTES: float(self._bytes),
                names.SYNC_SKIPPED: float(self._snapshots.take_skipped()),
            }
            self._bytes = 0
            self._pause_s = 0.0
        return window

    def close(self) -> None:
        """End the thread; receivers keep the weights they have."""
        with self._changed:
            self._closing = True
        self._ring()
        self._thread.join(CLOSE_S)
        self._sender.close(CLOSE_S)
        self._guard.stop()
        self._socket.close()
        self._context.term()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the weight publisher failed: {self._failure}") from self._failure

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _on_outcome(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self._ring()

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - raised again in the learner's thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        seen: int | None = None
        while not self._closing:
            ready = dict(poller.poll(TICK_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            with self._changed:
                newest = self._version
            if newest is not None and newest != seen:
                seen = newest
                self._perform(self._coordinator.on_published(newest, time.monotonic()))
            while not self._outcomes.empty():
                self._perform(self._on_sender(self._outcomes.get_nowait()))
            if self._socket in ready:
                self._read_messages()
            self._perform(self._coordinator.tick(time.monotonic()))
            self._note_progress(seen)

    def _read_messages(self) -> None:
        while self._socket.poll(0):
            address, *body = self._socket.recv_multipart()
            try:
                message = decode(b"".join(body))
            except WireError as error:
                self._perform([Send(address, Refused(str(error)))])
                continue
            self._perform(self._coordinator.on_message(address, message, time.monotonic()))

    def _on_sender(self, outcome: Outcome) -> list[Action]:
        now = time.monotonic()
        match outcome:
            case Sent(transfer, version, checksum, probe):
                with self._changed:
                    self._bytes += self._nbytes
                return self._coordinator.on_sent(transfer, version, checksum, now, probe)
            case SendFailed(transfer, reason):
                log.warning("weight transfer %d failed: %s", transfer, reason)
                return self._coordinator.on_send_failed(transfer, reason, now)
            case Crashed(error):
                raise error

    def _perform(self, actions: list[Action]) -> None:
        starts: list[StartSending] = []
        unreachable: list[bytes] = []
        for action in actions:
            match action:
                case Send(to, message):
                    if not self._deliver(to, message):
                        unreachable.append(to)
                case StartSending():
                    starts.append(action)
                case CloseGroup(name):
                    self._sender.close_group(name)
        for address in unreachable:
            self._perform(self._coordinator.on_unreachable(address, time.monotonic()))
        for start in starts:
            if self._coordinator.is_sending(start.transfer):  # nobody in it was found unreachable
                self._sender.start(start)

    def _deliver(self, to: bytes, message: Message) -> bool:
        try:
            self._socket.send_multipart([to, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _note_progress(self, seen: int | None) -> None:
        pause_s, dropped = self._coordinator.take_reports()
        for line in dropped:
            log.warning("receiver dropped: %s", line)
        with self._changed:
            self._served = seen if self._coordinator.idle else None
            self._behind = self._coordinator.behind()
            self._transfer_s = self._coordinator.transfer_s
            self._pause_s = max(self._pause_s, pause_s)
            self._changed.notify_all()
