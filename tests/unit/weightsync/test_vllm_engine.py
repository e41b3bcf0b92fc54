"""`VllmWeights` over a fake AsyncLLM; the real one is in tests/integration/test_weightsync_engine.py."""

import asyncio
import sys
from types import ModuleType

import pytest

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
