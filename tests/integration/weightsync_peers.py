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

TIMEOUT_S = 200.0


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


def probe_of(model: Any, weights: list[tuple[str, Any]]) -> tuple[list[int], list[float]]:
    import torch

    ids = list(range(10, 40))
    with torch.no_grad():
        logits = torch.func.functional_call(model, dict(weights), (torch.tensor([ids]),)).logits[0, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ids, logprobs.tolist()


def die_when_all_have_met(transport: Any) -> None:
    open_group = transport.open_group

    def open_and_die(*arguments: Any) -> None:
        open_group(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    transport.open_group = open_and_die


# --- publisher ----------------------------------------------------------------------------------------


def adapters_of(model: Any, version: int) -> list[tuple[str, Any]]:
    """A rank-2 adapter on every query and MLP projection; the same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(version)
    return [
        (f"{name}.{part}", 0.2 * torch.randn(shape, generator=generator))
        for name, p in model.named_parameters()
        if "q_proj" in name or "mlp" in name
        for part, shape in (("lora_A", (2, p.shape[1])), ("lora_B", (p.shape[0], 2)))
    ]


def with_adapters(model: Any, version: int) -> list[tuple[str, Any]]:
    """The weights that an engine must get from `adapters_of`."""
    adapters = dict(adapters_of(model, version))
    return [
        (name, p + adapters[f"{name}.lora_B"] @ adapters[f"{name}.lora_A"])
        if f"{name}.lora_A" in adapters
        else (name, p)
        for name, p in model.named_parameters()
    ]


def publisher(model_path: Path, run_dir: Path, role: str) -> None:
    """misshapen-publisher: the final norm is twice as long as the engine's, so that its load fails half way.
    adapter-publisher: only adapters travel."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.unit.weightsync.support import learner_spec
    from weightsync import sender
    from weightsync.publisher import Publisher

    model = AutoModelForCausalLM.from_pretrained(model_path)
    if role == "misshapen-publisher":
        model.model.norm.weight = torch.nn.Parameter(torch.ones(2 * model.config.hidden_size))
    tensors, whole = variant, variant
    if role == "adapter-publisher":
        tensors, whole = adapters_of, with_adapters
    metadata = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors(model, 0)]
    learner = Publisher(learner_spec(TIMEOUT_S), metadata, RunFolder(run_dir).read_keys())
    say(endpoint=learner.endpoint)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("die_in_transfer"):
            die_when_all_have_met(sender.transport)
        version = command["publish"]
        probe = ((), ()) if role == "misshapen-publisher" else probe_of(model, whole(model, version))
        learner.publish(version, tensors(model, version), probe)
        learner.wait_idle(TIMEOUT_S)
        say(published=version)


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
        publisher(model_path, run_dir, role)
    else:
        asyncio.run(actor(model_path, run_dir, fork=role == "forked-actor"))
