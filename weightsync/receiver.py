"""The actor's end: joins the publisher, obeys its transfers, and swaps weights into the running engine.

Invariants: the engine serves whole versions only; a failed transfer leaves the old one in place; an
engine that cannot be trusted any more (`EngineBroken`) ends the actor instead of serving. Owned by
`actors.actor` as the task `run()`. The engine is behind `UpdatableEngine`; `weightsync.vllm_engine` has
the real one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol

import zmq
import zmq.asyncio

from configs.run_folder import CurveKeys
from metrics import names
from metrics.record import Recorder
from weightsync.curve import secure_client
from weightsync.wire import (
    Abort,
    Alive,
    Begin,
    Commit,
    Dropped,
    Failed,
    GroupSpec,
    Join,
    Leave,
    Loaded,
    Message,
    Refused,
    Welcome,
    decode,
    encode,
)

ALIVE_EVERY_S = 1.0
STAGED_POLL_S = 0.02  # between looks at the staging once all bytes were sent
LEAVE_LINGER_MS = 1000  # at most, for the Leave to get out

log = logging.getLogger(__name__)


class TransferFailed(RuntimeError):
    """This transfer is lost; the engine serves the weights it had."""


class EngineBroken(RuntimeError):
    """The engine may hold half-loaded weights or does not answer: the actor must end."""


class SyncRefused(RuntimeError):
    """The publisher will never accept this receiver; the text says what to change."""


@dataclass(frozen=True)
class Staged:
    """What the engine's workers hold of the current transfer."""

    done: bool
    checksums: tuple[int, ...] = ()  # one per worker, once done
    error: str | None = None  # the transfer is lost


class UpdatableEngine(Protocol):
    """An engine whose weights can be replaced while requests are in flight.

    Order of calls: `begin`, `staged` until done, then `swap` or `abort`. Only `swap` disturbs generation.
    Every verb raises `EngineBroken` when the engine cannot serve any more.
    """

    async def devices(self) -> tuple[str, ...]:
        """Of its workers in rank order, as `weightsync.transport.device_name` tells them apart."""
        ...

    async def begin(self, group: GroupSpec, layout: Welcome) -> None:
        """Start to receive in the background; worker i takes rank `group.rank + i`."""
        ...

    async def staged(self) -> Staged: ...

    async def swap(self, version: int, *, clear_cache: bool) -> float:
        """Load what is staged and label it `version`; requests in flight go on. Returns seconds paused.

        `clear_cache`: forget all KV, so that requests in flight prefill again under the new weights.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Of each token but the first, given those before it, at temperature 1. Raises TimeoutError."""
        ...

    async def abort(self) -> None:
        """Let go of the transfer and discard what is staged. Harmless when there is none."""
        ...


class Receiver:
    def __init__(
        self,
        engine: UpdatableEngine,
        keys: CurveKeys,
        name: str,
        timeout_s: float,
        kv_cache: Literal["keep", "recompute"],
        *,
        probe_tolerance: float = 0.3,
        endpoint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: of one transfer. `probe_tolerance`: see `weightsync.probe_tolerance`. `endpoint`: the
        publisher's, here or by `set_endpoint`."""
        self.version = 0  # of the weights that the engine serves
        self._engine = engine
        self._keys = keys
        self._name = name
        self._timeout_s = timeout_s
        self._kv_cache = kv_cache
        self._probe_tolerance = probe_tolerance
        self._mistrusted = False  # the last probe failed
        self._clock = clock
        self._source = ""  # the publisher run that `version` came from
        self._endpoint: str | None = None
        self._endpoint_changed = asyncio.Event()
        self._layout: Welcome | None = None  # set once the publisher has welcomed us
        self._transfer: asyncio.Task[None] | None = None
        self._begun: int | None = None  # number of the running transfer
        self._commit: asyncio.Future[Commit] | None = None
        self._swapping = False
        self._loaded = asyncio.Condition()
        self._metrics = Recorder(clock=clock)
        if endpoint is not None:
            self.set_endpoint(endpoint)

    # --- the actor's side --------------------------------------------------------------------------

    def set_endpoint(self, endpoint: str) -> None:
        """Where the publisher is now (after a restart of the learner); the same one again changes nothing."""
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._endpoint_changed.set()

    @property
    def cache_salt(self) -> str | None:
        """vLLM's `cache_salt` for all requests of a trajectory that starts now.

        With kv_cache = "keep" it keeps new trajectories off prefix blocks of older weights; else None.
        The source is part of it, since a restarted learner may reuse version numbers.
        """
        return f"{self._source}/{self.version}" if self._kv_cache == "keep" else None

    async def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Until the engine serves `version` or a newer one. Raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s), self._loaded:
                await self._loaded.wait_for(lambda: self.version >= version)
        except TimeoutError:
            raise TimeoutError(
                f"{self._name} serves weight version {self.version}; {version} did not come "
                f"within {timeout_s:g} s"
            ) from None

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: seconds paused for new weights; and how the last transfer and swap went."""
        return self._metrics.take()

    async def run(self) -> None:
        """For ever. Raises `EngineBroken` or `SyncRefused`; cancelling it leaves the publisher."""
        devices = await self._engine.devices()
        context = zmq.asyncio.Context()
        try:
            while True:
                await self._endpoint_changed.wait()
                self._endpoint_changed.clear()
                await self._follow(context, devices)
        finally:
            context.destroy(linger=0)

    # --- one publisher -----------------------------------------------------------------------------

    async def _follow(self, context: zmq.asyncio.Context, devices: tuple[str, ...]) -> None:
        """Serve this endpoint until another one is set."""
        socket = context.socket(zmq.DEALER)
        secure_client(socket, self._keys)
        # The address survives a reconnect, but not a restart of the actor.
        socket.routing_id = f"{self._name}/{secrets.token_hex(4)}".encode()
        socket.sndhwm = 100  # to a dead publisher; what does not fit is not worth sending later
        assert self._endpoint is not None
        socket.connect(self._endpoint)
        self._layout = None
        try:
            while not self._endpoint_changed.is_set():
                join = Join(self._name, devices, self._source, self.version)
                await _send(socket, Alive() if self._layout else join)
                if await socket.poll(int(ALIVE_EVERY_S * 1000)):
                    await self._obey(decode(await socket.recv()), socket)
                if self._transfer is not None and self._transfer.done():
                    self._transfer.result()  # raises what ends the actor
            await self._let_go()
        finally:
            await self._end_transfer()
            await _send(socket, Leave())
            socket.close(linger=LEAVE_LINGER_MS)

    async def _obey(self, message: Message, socket: zmq.asyncio.Socket) -> None:
        match message:
            case Welcome():
                self._layout = message
            case Begin() if self._layout is not None:
                await self._let_go()
                self._begun = message.transfer
                self._commit = asyncio.get_running_loop().create_future()
                self._transfer = asyncio.create_task(self._take(message, self._layout, self._commit, socket))
            case Commit(transfer=number) if number == self._begun and self._commit is not None:
                if not self._commit.done():
                    self._commit.set_result(message)
            case Abort(transfer=number, reason=reason):
                if number == self._begun:
                    await self._let_go()
                await _send(socket, Failed(number, f"aborted: {reason}"))
            case Dropped(reason=reason):
                log.warning("%s was dropped by the weight publisher: %s", self._name, reason)
                await self._let_go()
                self._layout = None
                await asyncio.sleep(ALIVE_EVERY_S)  # not to hammer a publisher that keeps dropping us
            case Refused(reason=reason):
                raise SyncRefused(reason)

    async def _let_go(self) -> None:
        """End the running transfer, if any, and leave the engine ready for another."""
        if await self._end_transfer():
            await self._engine.abort()

    async def _end_transfer(self) -> bool:
        """Wait for a swap, cancel anything before it; True if a transfer was cut off."""
        task, self._transfer = self._transfer, None
        self._begun = None
        if task is None:
            return False
        cut_off = not self._swapping and not task.done()
        if cut_off:
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        return cut_off

    # --- one transfer ------------------------------------------------------------------------------

    async def _take(
        self, begin: Begin, layout: Welcome, sent: asyncio.Future[Commit], socket: zmq.asyncio.Socket
    ) -> None:
        started = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                commit = await self._stage(begin, layout, sent)
        except (TransferFailed, TimeoutError) as error:
            await self._engine.abort()
            reason = str(error) or f"not received within {self._timeout_s:g} s"
            log.warning("%s: weight transfer %d failed: %s", self._name, begin.transfer, reason)
            await _send(socket, Failed(begin.transfer, reason))
            return
        self._metrics.set(names.SYNC_TRANSFER_S, self._clock() - started)
        pause_s = await self._swap(commit, layout.source)
        if (difference := await self._difference(commit)) is None:
            await _send(socket, Loaded(begin.transfer, commit.version, pause_s))
        else:
            await _send(socket, Failed(begin.transfer, difference))

    async def _stage(self, begin: Begin, layout: Welcome, sent: asyncio.Future[Commit]) -> Commit:
        """Until all bytes are here and are those that were sent."""
        await self._engine.begin(begin.group, layout)
        commit = await self._until_sent(sent)
        staged = await self._engine.staged()
        while not staged.done:
            if staged.error is not None:
                raise TransferFailed(staged.error)
            await asyncio.sleep(STAGED_POLL_S)
            staged = await self._engine.staged()
        if any(checksum != commit.checksum for checksum in staged.checksums):
            raise TransferFailed(f"the bytes of version {commit.version} arrived damaged (checksum)")
        return commit

    async def _until_sent(self, sent: asyncio.Future[Commit]) -> Commit:
        """The publisher's Commit; a look at the staging now and then finds a sender that died."""
        while not sent.done():
            # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes with the Commit, and
            # a transfer that was let go would be loaded.
            await asyncio.wait([sent], timeout=ALIVE_EVERY_S)
            if not sent.done() and (staged := await self._engine.staged()).error is not None:
                raise TransferFailed(staged.error)
        return sent.result()

    async def _difference(self, commit: Commit) -> str | None:
        """How far the engine is from the learner, if that is too far: the weights are then sent again, and
        an engine that still differs is given up."""
        token_ids, expected = commit.probe.token_ids, commit.probe.logprobs
        if not token_ids:
            return None
        try:
            got = await self._engine.logprobs(token_ids)
        except TimeoutError:
            log.warning("%s: no time to probe weight version %d", self._name, commit.version)
            return None
        distance = fmean(abs(a - b) for a, b in zip(got, expected, strict=True))
        self._metrics.set(names.SYNC_PROBE, distance)
        if distance <= self._probe_tolerance:  # not so for NaN
            self._mistrusted = False
            return None
        difference = (
            f"with version {commit.version} the engine's logprobs differ from the learner's by "
            f"{distance:.2f} on average, more than weightsync.probe_tolerance = {self._probe_tolerance:g}"
        )
        log.warning("%s: %s", self._name, difference)
        if self._mistrusted:
            raise EngineBroken(f"{difference}, after the weights were loaded twice")
        self._mistrusted = True
        return difference

    async def _swap(self, commit: Commit, source: str) -> float:
        self._swapping = True
        try:
            pause_s = await self._engine.swap(commit.version, clear_cache=self._kv_cache == "recompute")
        finally:
            self._swapping = False
        self._metrics.add(names.ACTOR_PAUSED_S, pause_s)
        self._metrics.set(names.SYNC_PAUSE_S, pause_s)
        self._metrics.set(names.SYNC_VERSION, commit.version)
        self._metrics.set(names.SYNC_SWAPPED_AT, time.time())
        async with self._loaded:
            self.version = commit.version
            self._source = source
            self._loaded.notify_all()
        return pause_s


async def _send(socket: zmq.asyncio.Socket, message: Message) -> None:
    try:
        await socket.send(encode(message), zmq.NOBLOCK)
    except zmq.Again:
        # Only a publisher that has been away for long fills the queue; it forgets us and we join again.
        log.debug("dropped %s: the publisher takes no messages", type(message).__name__)
