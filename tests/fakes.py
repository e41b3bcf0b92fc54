"""Fakes of Slipstream's own interfaces, for tests of what stands on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from actors.engine import Sampled, Sampling

# --- actors.engine.Engine ---------------------------------------------------------------------------


class FakeEngine:
    """Answers each request by the script: request (prompt ids, sampling, request id) → token ids.

    `version` is the weight version it labels tokens with; a test may change it between or during requests.
    `requests` keeps every prompt that was asked for.
    """

    def __init__(self, script: Callable[[list[int], Sampling, str], Sequence[int]]) -> None:
        self._script = script
        self.version = 0
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.closed = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sampled:
        self.requests.append((list(prompt_ids), sampling, request_id))
        await asyncio.sleep(0)
        ids = list(self._script(list(prompt_ids), sampling, request_id))
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Sampled(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="length" if cut else "stop",
            prompt_tokens=len(prompt_ids),
        )

    async def close(self) -> None:
        self.closed = True
