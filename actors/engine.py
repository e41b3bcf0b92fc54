"""What the agent loop needs of an inference engine: token ids in, token ids and logprobs out.

Invariant: `len(token_ids) == len(logprobs) == len(versions)`, and the ids are the sampled ones,
never decoded and encoded again. `actors.vllm_engine` is the real one; `tests.fakes.FakeEngine` the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineDied(RuntimeError):
    """The engine cannot serve any more: an infrastructure error, the actor ends with it."""


@dataclass(frozen=True)
class Sampling:
    """The same in every turn of a trajectory, but for `max_tokens`, which is what room is left."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()  # kept in the output
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    seed: int | None = None  # of this request alone: evaluations draw the same whatever else runs
    logprobs: bool = True  # evaluation does without: they cost a fifth of the speed
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt


@dataclass(frozen=True)
class Sampled:
    """One generation. `finish_reason` is "stop" (token or string) or "length" (cut by `max_tokens`)."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens, of the distribution that was sampled (after temperature)
    versions: list[int]  # weight version that sampled each token
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache

    def followed_by(self, more: Sampled) -> Sampled:
        """One generation out of two, the second of which went on where the first had stopped."""
        return Sampled(
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.versions + more.versions,
            more.finish_reason,
            self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens,
        )


class Engine(Protocol):
    @property
    def kv_cache_tokens(self) -> int | None:
        """Tokens whose KV fits at once; None if the engine does not say."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sampled:
        """Sample one continuation. Raises `EngineDied`; cancelling the call aborts the request."""
        ...

    async def close(self) -> None: ...
