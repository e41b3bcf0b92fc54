"""vLLM's AsyncLLM behind `actors.engine.Engine`, on CPU and CUDA.

The same recipe on both: token ids in, FINAL_ONLY out, logprobs of the distribution that is sampled
(`processed_logprobs`), weight versions from vLLM's own per-token spans. vLLM is imported only in
`start`, since the import alone costs seconds. Called by `actors.actor` and `actors.evaluator`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.engine import EngineDied, Sampled, Sampling
from configs.schema import RunConfig

CPU_KV_CACHE_GIB = 2
CPU_BLOCK_SIZE = 32  # only full blocks hit the prefix cache; the default of 128 wastes short dialogues


def set_environment(device: str, threads: int) -> None:
    """Must run before vLLM is imported."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        settings |= {
            # torch.compile of one small function would cost 20 s at the first request.
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": str(threads),
            # Several engines on one machine would otherwise all bind to core 0.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
            # The worker lives inside EngineCore: one process and one import of vLLM less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: RunConfig, model_path: Path, device: str, seed: int) -> dict[str, Any]:
    """vLLM engine arguments: Slipstream's needs, then the user's `actors.engine` over them."""
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.model.dtype,
        "max_model_len": config.task.max_trajectory_tokens,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": seed,
    }
    if device == "cpu":
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE}
    return arguments | config.actors.engine


class VllmEngine:
    """One engine. Make it with `await VllmEngine.start(...)`; end it with `await close()`."""

    def __init__(self, llm: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self.llm = llm
        self._dead_error = EngineDeadError

    @classmethod
    async def start(
        cls, config: RunConfig, model_path: Path, device: str, threads: int, *, seed: int, version: int = 0
    ) -> VllmEngine:
        """Start EngineCore and label its weights `version`."""
        set_environment(device, threads)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from actors import vllm_lean
        from weightsync.vllm_engine import answer
        from weightsync.worker import BACKEND, EXTENSION

        vllm_lean.skip_unread_work()

        arguments = AsyncEngineArgs(
            **engine_arguments(config, model_path, device, seed),
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=EXTENSION,
        )
        vllm_config = arguments.create_engine_config()
        if device == "cpu":
            # EngineCore inherits the imported vLLM instead of importing it again. vLLM's CPU platform
            # forces "spawn" in create_engine_config, so this comes after it; no thread runs yet.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # What was imported stays: without this both processes' collectors walk through it now and then.
        gc.collect()
        gc.freeze()
        llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        await answer(llm, llm.update_weight_version(str(version)))
        return cls(llm)

    @property
    def kv_cache_tokens(self) -> int | None:
        cache = self.llm.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sampled:
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if sampling.cache_salt is not None:
            prompt["cache_salt"] = sampling.cache_salt
        try:
            final = None
            async for output in self.llm.generate(prompt, _vllm_sampling(sampling), request_id):
                final = output
        except self._dead_error as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
        if final is None:
            raise EngineDied("vLLM ended a request without any output")
        return _sampled(final)

    async def close(self) -> None:
        self.llm.shutdown()


def _vllm_sampling(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0 if sampling.logprobs else None,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # only stop strings need the text
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_special_tokens=False,
    )


def _sampled(output: Any) -> Sampled:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = [0.0] * len(token_ids)
    if completion.logprobs is not None:
        logprobs = completion.logprobs.logprobs  # flat, and with logprobs=0 one per token
    versions: list[int] = []
    for span in completion.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}")
    return Sampled(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=completion.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
    )
