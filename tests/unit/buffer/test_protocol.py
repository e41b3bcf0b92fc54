"""The protocol, explored at random: leases, puts, heartbeats, batches, commits, time, crashes in any order.

The model keeps only what the outside saw (acks, batches handed out, weights trained) and checks the promises:
nothing acked is lost, a step is always the same batch, no trajectory is trained twice in the history of
the weights that survive, an epoch visits each prompt once, and the ledger balances in index and store.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.messages import (
    Checkpointed,
    CommitStep,
    GetBatch,
    Gone,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    PutAck,
    PutTrajectory,
    Refused,
    Resume,
    ReturnLeases,
)
from tests.unit.buffer.support import Buffer, config, member, members

ACTORS = st.sampled_from(["actor-0", "actor-1", "actor-2"])
REWARDS = st.sampled_from([None, 0.0, 1.0, 0.5])
NUM_PROMPTS = 7
STEPS = 12


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.leases: list[tuple[str, Lease]] = []  # every grant ever seen, with its actor
        self.held_out: list[tuple[str, Lease]] = []  # the same of evaluations
        self.versions: dict[str, int] = {}  # weights that each actor has loaded
        self.acked: set[str] = set()  # trajectory ids whose put was acked as stored
        self.visited: set[tuple[int, int]] = set()  # (epoch, prompt)
        self.batches: dict[int, list[str]] = {}  # step → trajectory ids first handed out
        self.trained: list[str] = []  # by the learner's weights, in order
        self.step = self.version = 0  # of the learner's weights
        self.checkpoints: list[tuple[int, int, list[str]]] = [(0, 0, [])]  # step, version, what was trained

    @initialize(
        staleness=st.integers(0, 2),
        batch=st.integers(1, 3),
        on_stale=st.sampled_from(["drop", "mask"]),
        keep=st.sampled_from(["checkpoint", "all"]),
        max_rest=st.sampled_from([0, 4]),
        evaluate_every=st.sampled_from([0, 2]),
    )
    def start(
        self, staleness: int, batch: int, on_stale: str, keep: str, max_rest: int, evaluate_every: int
    ) -> None:
        self.settings = {
            "steps": STEPS,
            "on_stale": on_stale,
            "keep": keep,
            "curriculum_max_rest": max_rest,
            "evaluate_every": evaluate_every,
        }
        run_config = config(staleness=staleness, batch=batch, **self.settings)
        self.buffer = Buffer(self.folder / "buffer.sqlite", run_config, NUM_PROMPTS, num_held_out=3)

    def teardown(self) -> None:
        event(f"steps trained: {min(self.step, 4)}{'+' if self.step > 3 else ''}")
        if hasattr(self, "buffer"):
            self.buffer.close()
        shutil.rmtree(self.folder)

    # --- actors -------------------------------------------------------------------------------------

    @rule(actor=ACTORS, most=st.integers(1, 4))
    def lease(self, actor: str, most: int) -> None:
        for lease in self.buffer(LeaseRequest(actor, most, self.versions.get(actor, 0))).leases:
            if lease.kind == "eval":
                assert lease.version <= self.versions.get(actor, 0)
                self.held_out.append((actor, lease))
                continue
            self.leases.append((actor, lease))
            if lease.lease_id.endswith(".1"):
                assert (lease.epoch, lease.prompt_index) not in self.visited
                self.visited.add((lease.epoch, lease.prompt_index))

    @rule(actor=ACTORS, told=st.booleans())
    def die(self, actor: str, told: bool) -> None:
        """The launcher tells of the death, or the next process of that name says hello."""
        self.buffer(Gone((actor,)) if told else Hello("actor", actor))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reward=REWARDS, version_back=st.integers(0, 2))
    def put(self, data: st.DataObject, reward: float | None, version_back: int) -> None:
        """A member of any lease of the past: in time, late, or again."""
        actor, lease = data.draw(st.sampled_from(self.leases[-8:]))
        index = data.draw(st.sampled_from(lease.missing))
        version = max(0, self.versions.get(actor, 0) - version_back)
        sent = member(lease, index, reward=reward, version=version, actor=actor)
        ack = self.buffer(PutTrajectory(sent))
        assert isinstance(ack, PutAck)
        if ack.stored:
            assert sent.trajectory_id not in self.acked
            self.acked.add(sent.trajectory_id)
        elif sent.trajectory_id in self.acked:
            assert ack.duplicate

    @precondition(lambda self: self.held_out)
    @rule(data=st.data())
    def put_held_out(self, data: st.DataObject) -> None:
        """A result of any evaluation of the past: in time, late, or again."""
        actor, lease = data.draw(st.sampled_from(self.held_out[-8:]))
        sent = member(lease, 0, version=self.versions.get(actor, 0), actor=actor)
        assert isinstance(self.buffer(PutTrajectory(sent)), PutAck)
        assert not self.buffer(PutTrajectory(sent)).stored

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def put_all(self, data: st.DataObject) -> None:
        """A whole group as a healthy actor puts it."""
        self.put_group(*data.draw(st.sampled_from(self.leases[-8:])))

    def put_group(self, actor: str, lease: Lease) -> None:
        for index in lease.missing:
            sent = member(lease, index, reward=float(index), version=self.versions.get(actor, 0), actor=actor)
            if self.buffer(PutTrajectory(sent)).stored:
                self.acked.add(sent.trajectory_id)

    @rule(actor=ACTORS, knows=st.booleans(), finished=st.booleans())
    def beat(self, actor: str, knows: bool, finished: bool) -> None:
        leases = self.leases + self.held_out if knows else []
        names = tuple(lease.lease_id for owner, lease in leases if owner == actor)
        state = "finished" if finished else "running"
        ack = self.buffer(Heartbeat("actor", actor, names, self.versions.get(actor, 0), state))
        self.versions[actor] = ack.version

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        actor, lease = data.draw(st.sampled_from(self.leases))
        self.buffer(ReturnLeases(actor, (lease.lease_id,)))

    # --- the learner --------------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 1))
    def get_batch(self, ahead: int) -> None:
        self.fetch(self.step + 1 + ahead)

    def fetch(self, step: int) -> list[str] | None:
        reply = self.buffer(GetBatch(step, 0.0))
        if isinstance(reply, Refused) or reply.batch is None:
            assert step not in self.batches or (isinstance(reply, Refused) and step > STEPS)
            return None
        ids = [one.trajectory_id for group in members(reply.batch) for one in group]
        assert set(ids) <= self.acked
        assert self.batches.setdefault(step, ids) == ids
        return ids

    @rule(commits=st.booleans())
    def train(self, commits: bool) -> None:
        """An optimizer step; the learner may die before it can commit, and resumes later."""
        ids = self.fetch(self.step + 1)
        if ids is None:
            return
        assert not set(ids) & set(self.trained)
        self.trained = self.trained + ids
        self.step, self.version = self.step + 1, self.version + 1
        if commits:
            assert not isinstance(self.buffer(CommitStep(self.step, self.version)), Refused)
        else:
            self.checkpoint(reports=False)  # as in CASES M2: it died after the checkpoint, before the commit
            self.resume(0)

    @rule(reports=st.booleans())
    def checkpoint(self, reports: bool) -> None:
        self.checkpoints = [*self.checkpoints[-1:], (self.step, self.version, self.trained)]
        if reports:
            self.buffer(Checkpointed(self.step, self.checkpoints[0][0]))

    @rule(back=st.integers(0, 1))
    def resume(self, back: int) -> None:
        """The learner dies and comes back from one of its checkpoints."""
        self.checkpoints = self.checkpoints[: len(self.checkpoints) - back] or self.checkpoints
        self.step, self.version, self.trained = self.checkpoints[-1]
        reply = self.buffer(Resume(self.step, self.version))
        assert not isinstance(reply, Refused), reply

    @rule(actor=ACTORS, steps=st.integers(1, 3))
    def go_well(self, actor: str, steps: int) -> None:
        """What runs do most of the time."""
        for _ in range(steps):
            self.versions[actor] = self.buffer(Heartbeat("actor", actor, (), 0)).version
            known = len(self.leases)
            self.lease(actor, 4)
            for owner, lease in self.leases[known:]:
                self.put_group(owner, lease)
            self.train(commits=True)

    # --- the world ----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 11.0, 130.0]))
    def pass_time(self, seconds: float) -> None:
        self.buffer.pass_time(seconds)

    @rule()
    def crash(self) -> None:
        self.buffer.crash()

    @rule(staleness=st.integers(0, 2), batch=st.integers(1, 3))
    def crash_into_another_config(self, staleness: int, batch: int) -> None:
        self.buffer.crash(config(staleness=staleness, batch=batch, **self.settings))

    @rule(uncommitted=st.integers(1, 3), actor=ACTORS)
    def crash_before_the_commit(self, uncommitted: int, actor: str) -> None:
        """Requests were handled, but the transaction was never committed: nobody got a reply."""
        self.buffer.store.begin()
        self.buffer.broker.handle(LeaseRequest(actor, uncommitted, self.version), self.buffer.now)
        self.buffer.broker.handle(GetBatch(self.step + 1, 0.0), self.buffer.now)
        self.buffer.crash()

    # --- what holds after every step ----------------------------------------------------------------

    @invariant()
    def the_ledger_balances(self) -> None:
        if hasattr(self, "buffer"):
            assert self.buffer.status().balanced
            assert self.buffer.broker.audit() == []

    @invariant()
    def nothing_acked_is_lost(self) -> None:
        if hasattr(self, "buffer"):
            rows = self.buffer.store._connection.execute("SELECT trajectory_id FROM trajectories")
            stored = [trajectory_id for (trajectory_id,) in rows]
            assert self.acked <= set(stored) and len(stored) == len(set(stored))

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))
        assert self.trained == [one for step in range(1, self.step + 1) for one in self.batches[step]]


Protocol.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase
