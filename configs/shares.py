"""Which row of which task a prompt index means. Tasks and buffer must agree on it, and neither may import the
other. Pure; used by `tasks.mixture` and `buffer.curriculum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Share:
    """A task's part of each epoch."""

    prompts: int  # of one epoch
    rows: int  # that the task has


class Place(NamedTuple):
    """Where a prompt of an epoch comes from."""

    task: int  # number of its share
    row: int
    visit: int  # how often the epochs have come to this row before


def locate(shares: Sequence[Share], prompt_index: int, epoch: int) -> Place:
    """An epoch goes on in a task's rows where the one before ended."""
    left = prompt_index
    for number, share in enumerate(shares):
        if left < share.prompts:
            visit, row = divmod(epoch * share.prompts + left, share.rows)
            return Place(number, row, visit)
        left -= share.prompts
    raise IndexError(f"prompt {prompt_index} of {sum(share.prompts for share in shares)}")
