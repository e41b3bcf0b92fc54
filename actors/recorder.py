"""Builds one trajectory: tokens, action mask, behaviour logprobs and weight versions, always equally long.

Invariant: mask 1 exactly at sampled tokens. Called by `actors.agent_loop` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from actors.engine import Sampled
from buffer.messages import Lease, Trajectory, Turn
from toolcall.types import CallSpan, ToolResult

NOT_SAMPLED = -1  # version of prompt and observation tokens


class Recorder:
    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_len = len(prompt_ids)
        self.token_ids: list[int] = list(prompt_ids)
        self._mask: list[int] = [0] * self.prompt_len
        self._logprobs: list[float] = [0.0] * self.prompt_len
        self._versions: list[int] = [NOT_SAMPLED] * self.prompt_len
        self._turns: list[Turn] = []

    @property
    def num_sampled(self) -> int:
        return sum(self._mask)

    def add_sampled(self, sampled: Sampled) -> None:
        n = len(sampled.token_ids)
        if not n == len(sampled.logprobs) == len(sampled.versions):
            raise ValueError(
                f"the engine returned {n} tokens with {len(sampled.logprobs)} logprobs "
                f"and {len(sampled.versions)} versions"
            )
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self._mask += [1] * n
        self._logprobs += sampled.logprobs
        self._versions += sampled.versions
        self._turns.append(Turn(start, start + n, start + n, sampled.finish_reason))

    def add_observation(self, token_ids: Sequence[int], results: Sequence[ToolResult]) -> None:
        """Append what the turn's tool results added, generation header included, as mask 0."""
        n = len(token_ids)
        self.token_ids += token_ids
        self._mask += [0] * n
        self._logprobs += [0.0] * n
        self._versions += [NOT_SAMPLED] * n
        self._turns[-1] = replace(self._turns[-1], observation_end=len(self.token_ids))
        self._add_spans([result.span for result in results])

    def _add_spans(self, spans: Sequence[CallSpan]) -> None:
        calls = tuple({**asdict(span), "outcome": str(span.outcome)} for span in spans)
        self._turns[-1] = replace(self._turns[-1], calls=self._turns[-1].calls + calls)

    def finish(
        self,
        lease: Lease,
        index: int,
        *,
        actor: str,
        task: str,
        stop_reason: str,
        reward: float | None,
        reward_components: dict[str, float],
        error: str | None,
        metrics: dict[str, float],
        spans: Sequence[CallSpan] = (),
        turn_rewards: Sequence[float] = (),
    ) -> Trajectory:
        """spans: of all calls; those of a turn that was cut short in mid-call have no observation."""
        recorded = sum(len(turn.calls) for turn in self._turns)
        if self._turns:
            self._add_spans(spans[recorded:])
        turns = self._turns
        if turn_rewards:
            turns = [replace(turn, reward=r) for turn, r in zip(turns, turn_rewards, strict=True)]
        return Trajectory(
            trajectory_id=f"{lease.group_id}/{index}",
            group_id=lease.group_id,
            index=index,
            lease_id=lease.lease_id,
            actor=actor,
            task=task,
            prompt_index=lease.prompt_index,
            prompt_len=self.prompt_len,
            token_ids=np.asarray(self.token_ids, dtype="<i4"),
            action_mask=np.asarray(self._mask, dtype=np.uint8),
            logprobs=np.asarray(self._logprobs, dtype="<f4"),
            versions=np.asarray(self._versions, dtype="<i4"),
            turns=tuple(turns),
            stop_reason=stop_reason,
            reward=reward,
            reward_components=reward_components,
            error=error,
            metrics=metrics,
        )
