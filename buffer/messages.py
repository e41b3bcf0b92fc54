"""The whole wire protocol: every message between actors, learner, launcher and the buffer.

One request gets one reply. Requests are idempotent: a client that gets no reply in time sends
the same request again, to the same or to a restarted server, and the outcome is the same.
Arrays are one-dimensional little-endian numpy arrays of the dtype in their comment.
`buffer.codec` turns these dataclasses into MessagePack and back, checking every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

PROTOCOL_VERSION = 5


class StopReason(StrEnum):
    """Why a trajectory ended. Set by the agent loop."""

    ANSWER = "answer"  # the model ended its turn without a call
    MAX_TURNS = "max_turns"  # the turn cap; the last call was not executed
    MAX_TOKENS = "max_tokens"  # a turn was cut by its token limit
    CONTEXT_LENGTH = "context_length"  # no room left for an observation or another turn
    DEADLINE = "deadline"  # the trajectory's wall-clock deadline
    ERROR = "error"  # an episode error; see `Trajectory.error`


class DropReason(StrEnum):
    """Why a leased group was not trained. Set by the buffer; the ledger counts each."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    ALL_FAILED = "all_failed"  # fewer scored members than `buffer.min_group_survivors`
    EXPIRED = "expired"  # every lease of the group ran out
    SHUTDOWN = "shutdown"


# --- data -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One generation and the observation after it, as half-open token ranges of the trajectory."""

    start: int  # first sampled token
    end: int  # one past the last sampled token
    observation_end: int  # one past the observation (== end if there is none)
    finish_reason: str  # the engine's: "stop", "length"
    calls: tuple[dict[str, Any], ...] = ()  # toolcall.types.CallSpan as dicts, in call order
    reward: float = 0.0  # what the turn itself earned; a part of the trajectory's reward


@dataclass(frozen=True)
class Trajectory:
    """One episode, as facts. Set by `actors.recorder`; the learner only reads it.

    `len(token_ids) == len(action_mask) == len(logprobs) == len(versions)`, prompt included.
    """

    trajectory_id: str  # f"{group_id}/{index}": the same for every attempt at this member
    group_id: str
    index: int  # 0 .. group_size - 1
    lease_id: str
    actor: str
    task: str
    prompt_index: int
    prompt_len: int  # tokens before the first sampled one
    token_ids: np.ndarray  # int32 [T]
    action_mask: np.ndarray  # uint8 [T]; 1 = sampled by the policy
    logprobs: np.ndarray  # float32 [T]; behaviour logprob where mask is 1, else 0
    versions: np.ndarray  # int32 [T]; weight version that sampled the token where mask is 1, else -1
    turns: tuple[Turn, ...]
    stop_reason: str  # a StopReason
    reward: float | None = None  # None: unscorable; `error` says why
    reward_components: dict[str, float] = field(default_factory=dict)  # unweighted, by reward name
    error: str | None = None  # an episode error or why the reward is missing
    metrics: dict[str, float] = field(default_factory=dict)  # e.g. seconds generating, in tools


@dataclass(frozen=True)
class Lease:
    """The right to roll out one group until `deadline`. Set by the buffer."""

    lease_id: str
    group_id: str
    prompt_index: int  # row of the task's training data
    epoch: int
    group_size: int  # trajectories to put, indices 0 .. group_size - 1
    missing: tuple[int, ...]  # indices still wanted (fewer after another actor's lease expired)
    seed: int  # for sampling and tool RNGs of the group
    version: int  # weight version when granted
    deadline_s: float  # seconds from the grant; a heartbeat that names the lease renews it
    kind: str = "train"  # "eval": `prompt_index` is of the held-out prompts, sampled greedily, never trained


@dataclass(frozen=True)
class Batch:
    """The groups bound to one optimizer step: asking again for the same step gives the same batch."""

    step: int
    version: int  # the newest weight version when its step is trained, whenever it was fetched
    groups: tuple[tuple[Trajectory, ...], ...]  # scored members, each group in index order


# --- requests and their replies -----------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First message of every client."""

    role: str  # "actor", "learner", "launcher", "eval"
    name: str
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Welcome:
    run_id: str
    version: int
    publisher: str | None  # weightsync endpoint, once the learner has announced it


@dataclass(frozen=True)
class LeaseRequest:
    """Ask for up to `max_groups` groups. The actor sets `version` to the weights it has loaded."""

    actor: str
    max_groups: int
    version: int


@dataclass(frozen=True)
class LeaseGrant:
    leases: tuple[Lease, ...]
    reason: str  # why fewer than asked: "", "capacity", "weights_too_old", "draining", "paused", "finished"
    retry_after_s: float  # when to ask again if fewer were granted


@dataclass(frozen=True)
class Heartbeat:
    """Renews the leases named and reports. Sent by every role at least every `buffer.heartbeat_s`."""

    role: str
    name: str
    lease_ids: tuple[str, ...] = ()
    version: int = -1  # weights loaded (actors) or published (learner)
    state: str = "running"  # "starting", "running", "paused: <why>", "draining", "finished"
    metrics: dict[str, float] = field(default_factory=dict)  # gauges and window sums, metrics/names.py


@dataclass(frozen=True)
class HeartbeatAck:
    version: int  # newest published version
    publisher: str | None
    lost: tuple[str, ...]  # leases named that are no longer this actor's: stop working on them
    drain: bool  # finish or hand back leases, then stop
    finished: bool  # the run has trained its last step


@dataclass(frozen=True)
class ReturnLeases:
    """Hand leases back undone (drain, shutdown). Their missing members go to others."""

    actor: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True)
class PutTrajectory:
    trajectory: Trajectory


@dataclass(frozen=True)
class PutAck:
    """Sent only after the trajectory is in the store."""

    stored: bool  # False: `duplicate` or the group was already closed; either way do not send again
    duplicate: bool


@dataclass(frozen=True)
class GetBatch:
    """The learner's rank 0..n-1 each ask; all get the same batch. Blocks on the server at most `wait_s`."""

    step: int
    wait_s: float


@dataclass(frozen=True)
class BatchReply:
    batch: Batch | None  # None: not ready within wait_s; ask again
    ready: int = 0  # complete groups waiting, for the progress picture
    waits_for: str = ""  # without a batch: what is missing, and the actors that have paused and why


@dataclass(frozen=True)
class CommitStep:
    """The optimizer has taken `step` with its batch. Sent by learner rank 0."""

    step: int
    version: int  # version published after it (unchanged if this step published none)


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint of `step` is durable; batches up to `oldest_step` will never be asked for again."""

    step: int
    oldest_step: int


@dataclass(frozen=True)
class Resume:
    """The learner starts at `step` (0 for a new run): batches after it are served again, exactly as bound."""

    step: int
    version: int


@dataclass(frozen=True)
class AnnouncePublisher:
    """Where receivers join for weights. Sent by learner rank 0 at every start."""

    endpoint: str


@dataclass(frozen=True)
class Drain:
    """From the launcher: these actors shall finish their leases and stop."""

    actors: tuple[str, ...]


@dataclass(frozen=True)
class Gone:
    """From the launcher: the processes of these actors have ended, so their leases run out at once."""

    actors: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """From `launch.py scale`: the run shall have so many actors. The launcher reads it in `StatusReply`."""

    actors: int


@dataclass(frozen=True)
class Status:
    """From the launcher and `launch.py status`. `since`: the last report number already seen."""

    since: int = 0


@dataclass(frozen=True)
class RoleStatus:
    role: str
    name: str
    state: str
    version: int
    leases: int
    seconds_since_heard: float


@dataclass(frozen=True)
class StatusReply:
    run_id: str
    version: int
    step: int  # last committed step
    roles: tuple[RoleStatus, ...]
    ledger: dict[str, int]  # leased, trained, ready, running, dropped_<reason>
    balanced: bool
    reports: tuple[tuple[int, str, str, float, dict[str, float]], ...]
    # (number, role, name, unix time, metrics) of every Heartbeat with metrics after `since`
    finished: bool = False
    imbalance: tuple[str, ...] = ()  # what the last audit found, with the ids
    actors_wanted: int = 0  # by the last `Scale`; 0: none came yet
    held_out: dict[str, int] = field(default_factory=dict)  # the account of evaluations' prompts


@dataclass(frozen=True)
class Ok:
    pass


@dataclass(frozen=True)
class Refused:
    """The request was wrong or cannot be served. `reason` is one sentence with the mend."""

    reason: str
