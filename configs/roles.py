"""What a role process is told when it starts. Built by `launch.py`, pickled by Ray to the process.

Each role's module has `main(spec: RoleSpec) -> None`, which blocks until the role's work is done,
returns on a clean end (run finished, or drained) and raises on an infrastructure error:
`buffer.server.main`, `actors.actor.main`, `learner.learner.main`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import RunConfig
from configs.shares import Share


class EndsRun(RuntimeError):
    """An error of a role that starting it again cannot cure: the supervisor ends the run."""


@dataclass(frozen=True)
class RoleSpec:
    role: Literal["buffer", "actor", "learner"]
    name: str  # unique in the run: "buffer", "actor-0", "learner-1"
    rank: int  # among roles of the same kind
    world: int  # number of learners (learner) or 1
    config: RunConfig
    run_dir: Path
    run_id: str
    config_dir: Path  # the config file's folder: user modules and data files are relative to it
    model_path: Path  # a Hugging Face folder, already prepared
    num_prompts: int  # of one epoch, rows left out not counted
    buffer_endpoint: str  # tcp://host:port; the buffer binds it, the others connect
    device: Literal["cpu", "cuda"]
    threads: int  # CPU threads this process may use
    shares: tuple[Share, ...] = ()  # of each task, its part of an epoch; empty: the prompts are of one task
    num_held_out: int = 0  # prompts of an evaluation during training
    dropped_prompts: tuple[tuple[int, ...], ...] = ()  # of each task, rows whose prompts leave no room
    master: str = ""  # learners: "host:port" of rank 0's rendezvous
