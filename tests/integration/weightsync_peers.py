"""The two processes of the weightsync test: `python -m tests.integration.weightsync_peers actor|publisher …`.

Commands come as JSON lines on stdin, answers go as JSON lines on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from configs.run_folder import RunFolder

TIMEOUT_S = 60.0


def say(**answer: Any) -> None:
    print("\n" + json.dumps(answer), flush=True)  # libraries print unfinished lines of their own


def variant(model: Any, version: int) -> list[tuple[str, Any]]:
    """The weights of a version: the model's own for 0, else plainly different ones, the same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(version)
    return [
        (name, p.detach() + (0.3 * p.std() * torch.randn(p.shape, generator=generator) if version else 0))
        for name, p in model.named_parameters()
    ]


# --- publisher ----------------------------------------------------------------------------------------


def publisher(model_path: Path, run_dir: Path, *, misshapen: bool) -> None:
    """`misshapen`: the final norm is twice as long as the engine's, so that its load fails half way."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.unit.weightsync.support import learner_spec
    from weightsync import transport
    from weightsync.publisher import Publisher

    model = AutoModelForCausalLM.from_pretrained(model_path)
    if misshapen:
        model.model.norm.weight = torch.nn.Parameter(torch.ones(2 * model.config.hidden_size))
    metadata = [
        (name, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in model.named_parameters()
    ]
    learner = Publisher(learner_spec(TIMEOUT_S), metadata, RunFolder(run_dir).read_keys())
    say(endpoint=learner.endpoint)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("die_in_transfer"):
            transport.send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        learner.publish(command["publish"], variant(model, command["publish"]))
        learner.wait_idle(TIMEOUT_S)
        say(published=command["publish"])


# --- actor --------------------------------------------------------------------------------------------


async def start_engine(model_path: Path, *, fork: bool) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightsync.worker import BACKEND, EXTENSION

    arguments = AsyncEngineArgs(
        model=str(model_path),
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=True,
        generation_config="vllm",
        block_size=32,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=EXTENSION,
    )
    config = arguments.create_engine_config()
    if fork:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    await llm.update_weight_version("0")
    return llm


class Actor:
    """An engine with a receiver, which obeys the test."""

    def __init__(self, llm: Any, run_dir: Path) -> None:
        self.llm = llm
        self.keys = RunFolder(run_dir).read_keys()
        self.tasks: set[asyncio.Task[None]] = set()
        self.receiver: Any = None
        self.receiving: asyncio.Task[None] | None = None

    async def obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"receive": kv_cache, "endpoint": endpoint}:
                await self._receive(kv_cache, endpoint)
            case {"endpoint": endpoint}:
                self.receiver.set_endpoint(endpoint)
            case {"wait": version}:
                await self.receiver.wait_for_version(version, TIMEOUT_S)
                say(version=self.receiver.version, metrics=self.receiver.take_metrics())
            case {"generate": request_id}:
                task = asyncio.create_task(self._generate(request_id, command["ids"], command["tokens"]))
                self.tasks.add(task)

    async def _receive(self, kv_cache: str, endpoint: str) -> None:
        from weightsync.receiver import Receiver
        from weightsync.vllm_engine import VllmWeights

        if self.receiving is not None:
            self.receiving.cancel()
            await asyncio.wait([self.receiving])
        self.receiver = Receiver(
            VllmWeights(self.llm), self.keys, "actor-0", TIMEOUT_S, kv_cache, endpoint=endpoint
        )
        self.receiving = asyncio.create_task(self._run_receiver())

    async def _run_receiver(self) -> None:
        try:
            await self.receiver.run()
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            say(broken=str(error))

    async def _generate(self, request_id: str, ids: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if self.receiver is not None and self.receiver.cache_salt is not None:
            prompt["cache_salt"] = self.receiver.cache_salt
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, temperature=1.0, seed=1)
        final, started = None, False
        async for output in self.llm.generate(prompt, sampling, request_id):
            final = output
            if not started:
                started = True
                say(started=request_id)
        assert final is not None
        completion = final.outputs[0]
        say(
            generated=request_id,
            ids=list(completion.token_ids),
            logprobs=[at[i].logprob for i, at in zip(completion.token_ids, completion.logprobs, strict=True)],
            spans=[(int(span.version), span.start, span.end) for span in completion.weight_versions],
            finish=completion.finish_reason,
            cached=final.num_cached_tokens,
        )


async def actor(model_path: Path, run_dir: Path, *, fork: bool) -> None:
    me = Actor(await start_engine(model_path, fork=fork), run_dir)
    say(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await me.obey(json.loads(line))
    me.llm.shutdown()


if __name__ == "__main__":
    role, model_path, run_dir = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if role.endswith("publisher"):
        publisher(model_path, run_dir, misshapen=role == "misshapen-publisher")
    else:
        asyncio.run(actor(model_path, run_dir, fork=role == "forked-actor"))
