"""Evaluations while training goes on: held-out prompts leased to the same actors, greedy, never trained.

One is opened by the commit of a step that is due. It is closed when all its prompts are put, when the next is
due, or when the run ends.

What one measures: the weights of `version`, the newest when it was opened. Its prompts go to engines that
serve this version or a newer one, before anything is leased for training; an update may still reach an
episode in flight, as in training. So every result carries the versions that sampled it, and the report their
span.

Invariant: a prompt of an evaluation is put at most once; leased = done + running + dropped. Evaluations are
outside the staleness rule and the training ledger. Called by `buffer.broker`, inside the open transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from buffer.batches import RequestError
from buffer.evaluation_rows import EvaluationRows, Opened
from buffer.groups import Group, seed_of
from buffer.leases import MAX_EXPIRIES, Held, LeaseBook, lease_times
from buffer.messages import Lease, LeaseRequest, PutAck, Trajectory
from configs.schema import RunConfig

MAX_DIGITS = 18  # of a step: what SQLite holds
PREFIX = "eval-"  # of the ids of its groups and leases
_EXPIRED = f"{MAX_EXPIRIES} leases of it ran out"


def owns(identity: str) -> bool:
    """Is this the id of a group or lease of an evaluation?"""
    return identity.startswith(PREFIX)


class Evaluations:
    def __init__(self, config: RunConfig, rows: EvaluationRows, prompts: int, now: float) -> None:
        """prompts: of one evaluation, by their numbers 0 .. prompts - 1."""
        self._config, self._rows, self._prompts = config, rows, prompts
        self._leases = LeaseBook(lease_times(config))
        self._running: dict[str, Group] = {}  # leased and not put, by id
        self._next = 0  # first prompt that was never leased
        self._reports: list[dict[str, float]] = []
        self._open = rows.opened()
        if self._open is not None and self._open.prompts != prompts:
            rows.close(self._open.step)  # resumed with other data or settings
            self._open = None
        self._count_from_rows()
        if self._open is not None:
            self._restore(self._open, now)

    def _restore(self, opened: Opened, now: float) -> None:
        rows = self._rows.leased(opened.step)
        self._next = len(rows)
        for row in rows:
            if not row.is_put:
                group = self._group(opened, row.prompt_index)
                group.leases = row.grants
                self._running[group.group_id] = group
                self._leases.restore(f"{group.group_id}.{row.grants}", group, row.actor, now)

    # --- opening and closing --------------------------------------------------------------------------

    def committed(self, step: int, version: int) -> None:
        """The weights have seen `step`, and the newest are of `version`: open the evaluation that is due."""
        every = self._config.eval.every_steps
        is_due = every > 0 and step > 0 and step % every == 0 and step < self._config.learner.steps
        if self._prompts and is_due and not self._rows.has(step):
            self.close()
            self._open, self._next = Opened(step, version, self._prompts), 0
            self._rows.open(self._open)

    def resumed(self, step: int, version: int) -> None:
        """The weights are those after `step`: what was measured of later ones is gone with them."""
        if self._open is not None and self._open.step > step:
            self._close_leases()
            self._open = None
        self._rows.forget_after(step)
        self._count_from_rows()
        self.committed(step, version)

    def close(self) -> None:
        """Report what there is; what is leased and not put is dropped."""
        if self._open is None:
            return
        self._dropped += len(self._running)
        self._close_leases()
        self._rows.close(self._open.step)
        self._reports.append(self._rows.report(self._open))
        self._open = None

    def _close_leases(self) -> None:
        for group in self._running.values():
            self._leases.forget(group)
        self._running.clear()

    def take_reports(self) -> list[dict[str, float]]:
        """The metrics of evaluations closed since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # --- leases ---------------------------------------------------------------------------------------

    def lease(self, request: LeaseRequest, now: float) -> list[Lease]:
        """Prompts for an engine whose weights are new enough: given up ones first."""
        opened = self._open
        if opened is None or request.version < opened.version:
            return []
        groups = self._leases.waiting()[: max(0, request.max_groups)]
        for _ in range(min(request.max_groups - len(groups), opened.prompts - self._next)):
            group = self._group(opened, self._next)
            self._running[group.group_id] = group
            self._leased += 1
            self._next += 1
            groups.append(group)
        return [self._grant(opened, group, request.actor, now) for group in groups]

    def _group(self, opened: Opened, prompt_index: int) -> Group:
        group_id = f"{PREFIX}{opened.step}-{prompt_index}"
        seed = seed_of(self._config.seed, group_id)
        return Group(prompt_index, group_id, opened.step, prompt_index, size=1, spare=0, seed=seed)

    def _grant(self, opened: Opened, group: Group, actor: str, now: float) -> Lease:
        held = self._leases.grant(group, actor, now)
        self._rows.lease(opened.step, group.prompt_index, actor, group.leases)
        return Lease(
            lease_id=held.lease_id,
            group_id=group.group_id,
            prompt_index=group.prompt_index,
            epoch=opened.step,
            group_size=1,
            missing=held.members,
            seed=group.seed,
            version=opened.version,
            deadline_s=self._config.buffer.lease_timeout_s,
            kind="eval",
        )

    def heard(self, actor: str, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Renew the leases that an actor names. Returns those that are no longer its own."""
        lost = self._leases.renew(actor, lease_ids, now)
        for held in self._leases.unnamed(actor, now):
            self._expire(held)
        return lost

    def expire(self, now: float) -> None:
        """Take back the leases that ran out."""
        for held in self._leases.expired(now):
            self._expire(held)

    def lose(self, actor: str) -> None:
        """The actor's process is gone, and with it what it had leased."""
        for held in self._leases.of_actor(actor):
            self._expire(held)

    def take_back(self, actor: str, lease_ids: Collection[str] | None = None) -> None:
        """The actor hands back these leases, or all that it has."""
        for held in self._leases.of_actor(actor):
            if lease_ids is None or held.lease_id in lease_ids:
                self._leases.end(held)
                self._leases.wait(self._running[held.group_id])

    def _expire(self, held: Held) -> None:
        group = self._running[held.group_id]
        self._leases.end(held)
        group.expiries += 1
        if group.expiries < MAX_EXPIRIES:
            self._leases.wait(group)
        else:  # a prompt that kills its actors must not go round for ever
            self._rows.give_up(group.epoch, group.prompt_index, _EXPIRED)
            self._settle(group)

    # --- results --------------------------------------------------------------------------------------

    def put(self, trajectory: Trajectory, now: float) -> PutAck:
        """Keep what came of a prompt; its tokens are not kept."""
        group = self._running.get(trajectory.group_id)
        if group is None or trajectory.index != 0 or trajectory.prompt_index != group.prompt_index:
            return self._put_late(trajectory)
        self._rows.put(group.epoch, group.prompt_index, trajectory)
        self._leases.forget(group)
        self._settle(group)
        return PutAck(stored=True, duplicate=False)

    def _put_late(self, trajectory: Trajectory) -> PutAck:
        """Its prompt was put already, or its evaluation is closed, or forgotten with the weights."""
        step, _, prompt = trajectory.group_id.removeprefix(PREFIX).partition("-")
        if not step.isdecimal() or len(step) > MAX_DIGITS or prompt != str(trajectory.prompt_index):
            raise RequestError(f"{trajectory.group_id!r} names no prompt of an evaluation")
        return PutAck(stored=False, duplicate=self._rows.is_put(int(step), trajectory.prompt_index))

    def _settle(self, group: Group) -> None:
        del self._running[group.group_id]
        self._done += 1
        if self._open is not None and not self._running and self._next >= self._open.prompts:
            self.close()

    # --- the ledger -----------------------------------------------------------------------------------

    def _count_from_rows(self) -> None:
        counts = self._rows.counts()
        self._leased, self._done, self._dropped = counts["leased"], counts["done"], counts["dropped"]

    def counts(self) -> dict[str, int]:
        """Prompts of all evaluations; `leased` is the sum of the others."""
        return {
            "leased": self._leased,
            "done": self._done,
            "running": len(self._running),
            "dropped": self._dropped,
        }

    def differences(self) -> list[str]:
        """One sentence for each way in which the index and the store disagree."""
        stored = self._rows.counts()
        return [
            f"held-out prompts {name}: {count} counted, {stored[name]} stored"
            for name, count in self.counts().items()
            if count != stored[name]
        ]
