"""vLLM's AsyncLLM as an `UpdatableEngine`. Used by composition: `Receiver(VllmWeights(llm), ...)`.

Invariant: generation pauses only inside `swap`, and resumes only with whole weights under the right
version label. vLLM must run with `weightsync.worker`'s BACKEND and EXTENSION.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from weightsync.receiver import EngineBroken, Staged, TransferFailed
from weightsync.wire import GroupSpec, Welcome

PROBE_TIMEOUT_S = 60.0  # it queues behind all other requests
ENGINE_TIMEOUT_S = 120.0  # of one call; it waits for the engine's current step, at worst a long prefill
LOOK_S = 1.0  # between two looks at whether the engine lives

Result = TypeVar("Result")


async def answer(llm: Any, call: Coroutine[Any, Any, Result]) -> Result:
    """What the engine of `llm` says to a call, in time. Raises EngineBroken if it does not come or the engine
    is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    asked = asyncio.ensure_future(call)
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            while not asked.done():
                await asyncio.wait([asked], timeout=LOOK_S)
                if llm.errored and not asked.done():  # vLLM forgets a call that its engine took along
                    raise EngineBroken("vLLM's engine process ended during a call")
            if asked.cancelled():  # by vLLM, which closed the socket: it must not pass for our own end
                raise EngineBroken("vLLM gave up a call, as it does when its engine process ends")
            return asked.result()
    except EngineDeadError as error:
        raise EngineBroken(f"vLLM's engine process ended: {error}") from error
    except TimeoutError as error:
        raise EngineBroken(f"vLLM's engine did not answer within {ENGINE_TIMEOUT_S:g} s") from error
    finally:
        asked.cancel()


class VllmWeights:
    def __init__(self, llm: Any) -> None:
        """`llm`: a started `vllm.v1.engine.async_llm.AsyncLLM`."""
        self._llm = llm

    async def devices(self) -> tuple[str, ...]:
        return tuple(await answer(self._llm, self._llm.collective_rpc("weight_device")))

    async def begin(self, group: GroupSpec, layout: Welcome) -> None:
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        names, dtypes, shapes = zip(*layout.tensors, strict=True)
        update = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        init = {**vars(group), "bucket_bytes": layout.bucket_bytes}
        try:
            await answer(self._llm, self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init)))
            await answer(self._llm, self._llm.start_weight_update())
            await answer(self._llm, self._llm.update_weights(WeightTransferUpdateRequest(update)))
        except EngineBroken:
            raise
        except Exception as error:
            raise TransferFailed(f"the engine refused the transfer: {error}") from error

    async def staged(self) -> Staged:
        workers = await answer(self._llm, self._llm.collective_rpc("staged_weights"))
        errors = [error for _, _, error in workers if error]
        return Staged(
            done=all(complete for complete, _, _ in workers),
            checksums=tuple(checksum for _, checksum, _ in workers),
            error=errors[0] if errors else None,
        )

    async def swap(self, version: int, *, clear_cache: bool) -> float:
        """Raises EngineBroken if loading failed; the engine then stays paused, so that it serves nothing."""
        started = time.perf_counter()
        try:
            await answer(self._llm, self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
            await answer(self._llm, self._llm.finish_weight_update(weight_version=str(version)))
            await answer(self._llm, self._llm.resume_generation())
        except EngineBroken:
            raise
        except Exception as error:
            raise EngineBroken(f"loading weight version {version} failed half way: {error}") from error
        return time.perf_counter() - started

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        # vLLM serves no request for prompt logprobs from its prefix cache.
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(token_ids)}
        name = f"probe-{secrets.token_hex(4)}"
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                outputs = [output async for output in self._llm.generate(prompt, sampling, name)]
        except EngineDeadError as error:
            raise EngineBroken(f"vLLM's engine process ended: {error}") from error
        if not outputs:
            raise EngineBroken("vLLM ended a request for logprobs without any output")
        given = zip(token_ids[1:], outputs[-1].prompt_logprobs[1:], strict=True)
        return [at[token].logprob for token, at in given]

    async def abort(self) -> None:
        await answer(self._llm, self._llm.collective_rpc("abort_weight_update"))
