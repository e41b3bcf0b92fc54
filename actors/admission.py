"""How many groups an actor may add to those in flight: by configuration and by what the KV cache holds.

When running requests need more KV than there is, vLLM preempts some and prefills them again later, which
costs more than starting them later. Needs no look into the engine: trajectories say how long they were.
Pure; used by `actors.actor`.
"""

from __future__ import annotations

USABLE = 0.9  # of the cache: blocks are not filled to the last token
MEMORY = 0.98  # weight of the past in the running mean; some 50 trajectories


class Admission:
    def __init__(
        self, max_groups: int, group_size: int, max_tokens: int, kv_cache_tokens: int | None
    ) -> None:
        """`max_groups` of `group_size` trajectories of at most `max_tokens` tokens each; `kv_cache_tokens`:
        what the engine's cache holds, None for no limit."""
        self._max_members = max_groups * group_size
        self._group_size = group_size
        self._capacity = None if kv_cache_tokens is None else USABLE * kv_cache_tokens
        # Until a trajectory has ended, the worst is expected of all.
        self._prompt_tokens = 0.0
        self._own_tokens = float(max_tokens)
        self._observed = False

    def observe(self, prompt_tokens: int, tokens: int) -> None:
        """A trajectory has ended with so many tokens, its prompt (which its group shares) included."""
        memory = MEMORY if self._observed else 0.0
        self._observed = True
        self._prompt_tokens += (1 - memory) * (prompt_tokens - self._prompt_tokens)
        self._own_tokens += (1 - memory) * (tokens - prompt_tokens - self._own_tokens)

    def free_groups(self, members: int) -> int:
        """Whole groups that fit beside `members` trajectories in flight; at least one if there are none."""
        most = self._max_members
        if self._capacity is not None:
            group_tokens = self._prompt_tokens + self._group_size * self._own_tokens
            most = min(most, int(self._capacity / group_tokens) * self._group_size)
        return max((most - members) // self._group_size, 0 if members else 1)
