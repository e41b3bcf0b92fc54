"""`VllmWeights` over a fake AsyncLLM; the real one is in tests/integration/test_weightsync_engine.py."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import actors.vllm_engine
from configs.schema import RunConfig
from weightsync import vllm_engine
from weightsync.receiver import EngineBroken, Staged
from weightsync.vllm_engine import VllmWeights


class EngineDeadError(Exception):
    pass


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """The exceptions' module alone, since importing vLLM takes many seconds."""
    module = ModuleType("vllm.v1.engine.exceptions")
    module.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", module)


class FakeLLM:
    """Records the calls; `errors` maps a call to what it raises."""

    def __init__(self, **errors: Exception) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.errors = errors
        self.workers: list[tuple[bool, int, str]] = []
        self.errored = False

    def __getattr__(self, name: str):
        async def call(*_args, **kwargs):
            self.calls.append((name, kwargs))
            if name in self.errors:
                raise self.errors[name]
            return self.workers

        return call


def test_a_swap_pauses_loads_labels_and_resumes():
    llm = FakeLLM()
    assert asyncio.run(VllmWeights(llm).swap(7, clear_cache=False)) >= 0
    assert llm.calls == [
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("finish_weight_update", {"weight_version": "7"}),
        ("resume_generation", {}),
    ]


def test_m5_an_engine_that_failed_to_load_is_not_resumed():
    llm = FakeLLM(finish_weight_update=Exception("shape mismatch"))
    with pytest.raises(EngineBroken, match="version 7 failed half way: shape mismatch"):
        asyncio.run(VllmWeights(llm).swap(7, clear_cache=True))
    assert "resume_generation" not in [name for name, _ in llm.calls]


def test_a_dead_engine_process_is_broken():
    llm = FakeLLM(collective_rpc=EngineDeadError("gone"))
    with pytest.raises(EngineBroken, match="process ended: gone"):
        asyncio.run(VllmWeights(llm).abort())


def test_an_engine_that_dies_during_a_call_ends_it(monkeypatch):
    monkeypatch.setattr(vllm_engine, "LOOK_S", 0.01)

    class Dying(FakeLLM):
        async def pause_generation(self, **_):
            self.errored = True
            await asyncio.Event().wait()

    with pytest.raises(EngineBroken, match="process ended during a call"):
        asyncio.run(asyncio.wait_for(VllmWeights(Dying()).swap(7, clear_cache=False), 60))


def test_a_call_that_vllm_cancels_ends_the_engine_and_not_the_caller_in_silence():
    class Closing(FakeLLM):
        async def collective_rpc(self, *_):
            raise asyncio.CancelledError  # as pyzmq does to what waits for a socket that is closed

    async def as_a_task():
        return await asyncio.create_task(VllmWeights(Closing()).staged())

    with pytest.raises(EngineBroken, match="gave up a call"):
        asyncio.run(as_a_task())


def test_an_engine_that_dies_in_its_first_call_fails_the_start(monkeypatch):
    monkeypatch.setattr(vllm_engine, "LOOK_S", 0.01)

    class Dying(FakeLLM):
        async def update_weight_version(self, _version):
            self.errored = True
            await asyncio.Event().wait()

    llm = Dying()
    anything = SimpleNamespace(create_engine_config=lambda: None)
    for name, holds in {
        "vllm.config": {"WeightTransferConfig": lambda **_: None},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda **_: anything},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_vllm_config=lambda *_, **__: llm)},
        "actors.vllm_lean": {"skip_unread_work": lambda: None},
        "weightsync.worker": {"BACKEND": "", "EXTENSION": ""},
    }.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(actors, "vllm_lean", sys.modules["actors.vllm_lean"], raising=False)
    monkeypatch.setattr(actors.vllm_engine, "set_environment", lambda *_: None)
    with pytest.raises(EngineBroken, match="process ended during a call"):
        start = actors.vllm_engine.VllmEngine.start(RunConfig(), Path("model"), "cuda", 1, seed=0)
        asyncio.run(asyncio.wait_for(start, 60))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([(True, 5, ""), (True, 5, "")], Staged(True, (5, 5))),
        ([(True, 5, ""), (False, 0, "")], Staged(False, (5, 0))),
        ([(True, 5, ""), (False, 0, "reset")], Staged(False, (5, 0), "reset")),
    ],
)
def test_a_transfer_is_staged_when_every_worker_has_it(workers, expected):
    llm = FakeLLM()
    llm.workers = workers
    assert asyncio.run(VllmWeights(llm).staged()) == expected
