"""Who gets which weights when: the publisher's decisions, without sockets, threads or clocks.

Two rules. Members that lack the newest version get it together, in one broadcast, as soon as no such
broadcast runs; a member that has just joined does not wait for that and gets a transfer of its own.
And whoever cannot be reached, is silent, or does not answer by a transfer's deadline, is dropped and has to
join again; those who did answer go on without it after `STRAGGLER_S`. Every method takes the time and returns
the `Action`s to perform, in order. Driven by `weightsync.publisher`'s thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from weightsync import backends
from weightsync.wire import (
    NO_PROBE,
    PROTOCOL,
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
    Probe,
    Refused,
    TensorMeta,
    Welcome,
)

MAX_FAILURES = 3  # failed transfers in a row before a member has to join again
PROBE_S = 1.0  # between messages to members that owe an answer: those to a dead one cannot be delivered
STRAGGLER_S = 5.0  # members that have answered wait so long for the others before the next broadcast


@dataclass(frozen=True)
class Settings:
    source: str  # this publisher run
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int
    backend: str  # `weightsync.backend`
    device: str  # the publisher's
    host: str  # of the store
    port: int
    timeout_s: float  # of one transfer
    silence_s: float  # a member that says nothing for so long, or does not answer an Abort, is gone
    folder: str = ""  # of the disk backend


@dataclass(frozen=True)
class Send:
    to: bytes  # a member's address
    message: Message


@dataclass(frozen=True)
class StartSending:
    """Broadcast the newest snapshot in `group` (opening it if need be); report with `on_sent` or
    `on_send_failed`."""

    transfer: int
    group: GroupSpec


@dataclass(frozen=True)
class CloseGroup:
    name: str


Action = Send | StartSending | CloseGroup


class Phase(Enum):
    SENDING = "sending"
    LOADING = "loading"  # all bytes are out; members check, swap and answer
    ABORTING = "aborting"  # members are asked to let go and answer


@dataclass
class Member:
    address: bytes
    name: str
    devices: tuple[str, ...]
    heard: float
    held: tuple[str, int]  # (source, version) of its weights
    newcomer: bool = True  # has not loaded anything from this publisher yet
    failures: int = 0


@dataclass
class Transfer:
    number: int
    group: GroupSpec
    members: dict[bytes, Member]  # those who still owe an answer
    deadline: float
    started: float
    since: float  # when the phase began
    main: bool  # the broadcast to the settled members; False: to newcomers
    phase: Phase = Phase.SENDING

    def enter(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now

    def holds_up(self, now: float) -> bool:
        """Members that have answered still wait for the others."""
        return self.main and (self.phase is Phase.SENDING or now - self.since < STRAGGLER_S)


class Coordinator:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._members: dict[bytes, Member] = {}
        self._transfers: dict[int, Transfer] = {}
        self._latest: int | None = None
        self._numbers = 0
        self._main_group: tuple[GroupSpec, tuple[bytes, ...]] | None = None
        self.transfer_s = 0.0  # of the last broadcast: from Begin until all bytes were out
        self._pause_s = 0.0
        self._dropped: list[str] = []
        self._probed = 0.0

    @property
    def idle(self) -> bool:
        """Every member holds the newest version."""
        return not self._transfers and not self._behind()

    def behind(self) -> list[str]:
        return [member.name for member in self._members.values() if self._lacks_latest(member)]

    def take_reports(self) -> tuple[float, list[str]]:
        """Since the last call: the longest pause that a member reported, and a line per member dropped."""
        reports = (self._pause_s, self._dropped)
        self._pause_s, self._dropped = 0.0, []
        return reports

    # --- what happens ------------------------------------------------------------------------------

    def on_published(self, version: int, now: float) -> list[Action]:
        self._latest = version
        return self._schedule(now)

    def on_message(self, address: bytes, message: Message, now: float) -> list[Action]:
        if isinstance(message, Join):
            return self._on_join(address, message, now)
        member = self._members.get(address)
        if member is None:
            return [] if isinstance(message, Leave) else [Send(address, Dropped("not a member"))]
        member.heard = now
        match message:
            case Alive():
                return []
            case Leave():
                return self._forget(member, "left", now) + self._schedule(now)
            case Loaded():
                return self._on_loaded(member, message, now)
            case Failed():
                return self._on_failed(member, message, now)
        return [Send(address, Refused(f"{type(message).__name__} is not a receiver's message"))]

    def on_sent(
        self, number: int, version: int, checksum: int, now: float, probe: Probe = NO_PROBE
    ) -> list[Action]:
        """All bytes of the transfer are out; it carried `version`."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.phase is not Phase.SENDING:
            return []
        transfer.enter(Phase.LOADING, now)
        self.transfer_s = now - transfer.started
        return [Send(address, Commit(number, version, checksum, probe)) for address in transfer.members]

    def on_send_failed(self, number: int, reason: str, now: float) -> list[Action]:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.phase is not Phase.SENDING:
            return []
        return self._abort(transfer, reason, now)

    def is_sending(self, number: int) -> bool:
        transfer = self._transfers.get(number)
        return transfer is not None and transfer.phase is Phase.SENDING

    def on_unreachable(self, address: bytes, now: float) -> list[Action]:
        """A message could not be delivered: the connection is closed."""
        member = self._members.get(address)
        if member is None:
            return []
        self._dropped.append(f"{member.name}: its connection is closed")
        return self._forget(member, "its connection is closed", now) + self._schedule(now)

    def tick(self, now: float) -> list[Action]:
        """Enforce the deadlines. Called several times a second."""
        actions: list[Action] = []
        for member in list(self._members.values()):
            if now - member.heard > self._settings.silence_s:
                actions += self._drop(member, f"silent for {self._settings.silence_s:g} s", now)
        for transfer in list(self._transfers.values()):
            if now < transfer.deadline or transfer.number not in self._transfers:
                continue
            if transfer.phase is Phase.SENDING:
                actions += self._abort(transfer, f"not sent within {self._settings.timeout_s:g} s", now)
                continue
            for member in list(transfer.members.values()):
                actions += self._drop(member, f"no answer while {transfer.phase.value} weights", now)
        return actions + self._schedule(now) + self._probe(now)

    def _probe(self, now: float) -> list[Action]:
        """Find those who died in a transfer at once, not by their silence: see `on_unreachable`."""
        if now - self._probed < PROBE_S:
            return []
        self._probed = now
        return [
            Send(address, Alive()) for transfer in self._transfers.values() for address in transfer.members
        ]

    # --- members -----------------------------------------------------------------------------------

    def _on_join(self, address: bytes, join: Join, now: float) -> list[Action]:
        reason = self._refusal(join)
        if reason is not None:
            return [Send(address, Refused(reason))]
        actions: list[Action] = []
        for other in list(self._members.values()):
            if other.name == join.name and other.address != address:
                actions += self._drop(other, "replaced by a newer join of the same name", now)
        settings = self._settings
        if address not in self._members:
            self._members[address] = Member(
                address, join.name, join.devices, now, held=(join.source, join.version)
            )
        self._members[address].heard = now
        welcome = Welcome(settings.source, settings.tensors, settings.bucket_bytes)
        return [*actions, Send(address, welcome), *self._schedule(now)]

    def _refusal(self, join: Join) -> str | None:
        if join.protocol != PROTOCOL:
            return (
                f"{join.name} speaks weightsync protocol {join.protocol}, the learner {PROTOCOL}; "
                "install the same release on both"
            )
        if not join.devices:
            return f"{join.name} named no worker of its engine"
        return backends.refusal(self._settings.backend, self._settings.device, join.name, join.devices)

    def _drop(self, member: Member, reason: str, now: float) -> list[Action]:
        self._dropped.append(f"{member.name}: {reason}")
        return [Send(member.address, Dropped(reason)), *self._forget(member, reason, now)]

    def _forget(self, member: Member, reason: str, now: float) -> list[Action]:
        """What the member took part in goes on without it, or is aborted if bytes still flow."""
        del self._members[member.address]
        actions: list[Action] = []
        for transfer in list(self._transfers.values()):
            if transfer.members.pop(member.address, None) is not None:
                if transfer.phase is Phase.SENDING:
                    actions += self._abort(transfer, f"{member.name} is gone: {reason}", now)
                actions += self._end_if_answered(transfer)
        return actions

    # --- transfers ---------------------------------------------------------------------------------

    def _lacks_latest(self, member: Member) -> bool:
        return self._latest is not None and member.held != (self._settings.source, self._latest)

    def _behind(self) -> list[Member]:
        busy = {address for transfer in self._transfers.values() for address in transfer.members}
        return [
            member
            for member in self._members.values()
            if member.address not in busy and self._lacks_latest(member)
        ]

    def _schedule(self, now: float) -> list[Action]:
        behind = self._behind()
        if not any(transfer.holds_up(now) for transfer in self._transfers.values()):
            if any(not member.newcomer for member in behind):
                return self._begin(behind, now, main=True)
        else:
            behind = [member for member in behind if member.newcomer]
        return self._begin(behind, now, main=False) if behind else []

    def _begin(self, members: list[Member], now: float, *, main: bool) -> list[Action]:
        self._numbers += 1
        group, actions = self._group_of(members, main)
        transfer = Transfer(
            number=self._numbers,
            group=group,
            members={member.address: member for member in members},
            deadline=now + self._settings.timeout_s,
            started=now,
            since=now,
            main=main,
        )
        self._transfers[transfer.number] = transfer
        rank = 1
        for member in members:
            actions.append(Send(member.address, Begin(transfer.number, replace(group, rank=rank))))
            rank += len(member.devices)
        return [*actions, StartSending(transfer.number, group)]

    def _group_of(self, members: list[Member], main: bool) -> tuple[GroupSpec, list[Action]]:
        """The main group while its members stay the same, else a new one."""
        addresses = tuple(member.address for member in members)
        if main and self._main_group is not None and self._main_group[1] == addresses:
            return self._main_group[0], []
        settings = self._settings
        group = GroupSpec(
            backend=self._backend_for(members),
            host=settings.host,
            port=settings.port,
            name=f"{settings.source}/{self._numbers}",
            rank=0,
            world=1 + sum(len(member.devices) for member in members),
            timeout_s=settings.timeout_s,
            folder=settings.folder,
        )
        if not main:
            return group, []
        actions = self._close_main_group()
        self._main_group = (group, addresses)
        return group, actions

    def _close_main_group(self) -> list[Action]:
        if self._main_group is None:
            return []
        name = self._main_group[0].name
        self._main_group = None
        return [CloseGroup(name)]

    def _backend_for(self, members: list[Member]) -> str:
        settings = self._settings
        return backends.choose(settings.backend, settings.device, [member.devices for member in members])

    def _abort(self, transfer: Transfer, reason: str, now: float) -> list[Action]:
        transfer.enter(Phase.ABORTING, now)
        transfer.deadline = now + self._settings.silence_s
        actions = self._close(transfer)
        actions += [Send(address, Abort(transfer.number, reason)) for address in transfer.members]
        return actions

    def _close(self, transfer: Transfer) -> list[Action]:
        if self._main_group is not None and transfer.group.name == self._main_group[0].name:
            return self._close_main_group()
        return [CloseGroup(transfer.group.name)]

    def _on_loaded(self, member: Member, message: Loaded, now: float) -> list[Action]:
        transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.members.pop(member.address, None) is None:
            return []
        member.held = (self._settings.source, message.version)
        member.newcomer = False
        member.failures = 0
        self._pause_s = max(self._pause_s, message.pause_s)
        return self._end_if_answered(transfer) + self._schedule(now)

    def _on_failed(self, member: Member, message: Failed, now: float) -> list[Action]:
        transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.members.pop(member.address, None) is None:
            return []
        actions: list[Action] = []
        if transfer.phase is Phase.SENDING:
            actions += self._abort(transfer, f"{member.name} failed: {message.reason}", now)
        member.failures += 1
        if member.failures >= MAX_FAILURES:
            actions += self._drop(member, f"{MAX_FAILURES} failures in a row, last: {message.reason}", now)
        return actions + self._end_if_answered(transfer) + self._schedule(now)

    def _end_if_answered(self, transfer: Transfer) -> list[Action]:
        if transfer.members or self._transfers.pop(transfer.number, None) is None:
            return []
        return [] if transfer.main else self._close(transfer)
