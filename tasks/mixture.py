"""Several tasks in one run: which task and row a prompt index means.

Invariant: in each epoch a task has its weight's share of the prompts, and over the epochs every row of it is
visited equally often. A run without `task.mix` is a mixture of one. Called by actors, the evaluator and the
launcher, which all get the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.load import load_config
from configs.schema import TaskConfig
from configs.shares import Share, locate
from tasks.loading import BadTask, load_task, without_prompts
from tasks.types import Row, Task

_SETTINGS = ("config", "weight")


@dataclass(frozen=True)
class Part:
    """One task of the mixture: `share` prompts of each epoch are its own."""

    task: Task
    limits: TaskConfig
    config_dir: Path
    weight: float = 1.0
    share: int = 0


@dataclass(frozen=True)
class Mixture:
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return sum(part.share for part in self.parts)

    def pick(self, prompt_index: int, epoch: int) -> tuple[int, Row]:
        """Number of the part, and the row."""
        place = locate(self.shares, prompt_index, epoch)
        return place.task, self.parts[place.task].task.train[place.row]

    def held_out(self, prompts: int) -> list[tuple[int, Row]]:
        """Of each part the first `prompts` held-out rows, each with the part's number."""
        return [
            (number, part.task.held_out[row])
            for number, part in enumerate(self.parts)
            for row in range(min(prompts, len(part.task.held_out)))
        ]

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(part.share, len(part.task.train)) for part in self.parts)


def load_mixture(
    config: TaskConfig, config_dir: Path, seed: int, dropped: Sequence[Sequence[int]] = ()
) -> Mixture:
    """The tasks of `config.mix`, or the one task that `config` itself is; `dropped`: rows to leave out of
    each. Raises BadTask and whatever `load_task` raises.
    """
    found = [_part(entry, config, config_dir, seed) for entry in config.mix]
    if not found:
        found = [Part(load_task(config, config_dir, seed), config, config_dir)]
    names = [part.task.name for part in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadTask(f"task.mix has two tasks called {twice!r}; metrics could not tell them apart")
    tasks = [
        without_prompts(part.task, rows)
        for part, rows in zip(found, dropped or [()] * len(found), strict=True)
    ]
    total = sum(len(task.train) for task in tasks)
    weights = sum(part.weight for part in found)
    shares = [max(1, round(total * part.weight / weights)) for part in found]
    return Mixture(
        tuple(
            Part(task, part.limits, part.config_dir, part.weight, share)
            for task, part, share in zip(tasks, found, shares, strict=True)
        )
    )


def _part(entry: dict[str, Any], config: TaskConfig, config_dir: Path, seed: int) -> Part:
    if unknown := next((key for key in entry if key not in _SETTINGS), None):
        raise BadTask(f"task.mix: {unknown!r} in {entry} is not one of {', '.join(_SETTINGS)}")
    weight = entry.get("weight", 1.0)
    if not isinstance(entry.get("config"), str):
        raise BadTask(f'task.mix: {entry} names no recipe; write {{ config = "other.toml", weight = 2 }}')
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise BadTask(f"task.mix: weight = {weight!r} of {entry['config']} must be a number above 0")
    loaded = load_config(config_dir / entry["config"])
    limits = loaded.config.task
    if limits.mix:
        raise BadTask(f"task.mix: {entry['config']} is itself a mixture; name its recipes here instead")
    if limits.max_trajectory_tokens > config.max_trajectory_tokens:
        raise BadTask(
            f"task.max_trajectory_tokens = {config.max_trajectory_tokens} is less than the "
            f"{limits.max_trajectory_tokens} of {entry['config']}; raise it: the engine is made for it"
        )
    return Part(load_task(limits, loaded.config_dir, seed), limits, loaded.config_dir, float(weight))
