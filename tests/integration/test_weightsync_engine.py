"""Weight updates in a real vLLM engine while it generates, from a publisher in another process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from configs.run_folder import RunFolder
from tests.integration.processes import left_alive
from tests.integration.weightsync_peers import variant, with_adapters
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START_S, ANSWER_S = 400.0, 300.0  # only a failing test waits so long
PROMPT = list(range(5, 105))  # three full prefix blocks of 32
ENGINE_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


class Peer:
    """A process of `weightsync_peers`, spoken to in JSON lines."""

    def __init__(self, role: str, model: Path, run_dir: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.weightsync_peers", role, str(model), str(run_dir)],
            cwd=ROOT,
            env=os.environ | ENGINE_ENVIRONMENT | environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        answer = self._answers.get(timeout=timeout_s)
        assert key in answer, f"expected {key}, got {answer}"
        return answer

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)


class Rig:
    """One engine process, and publishers as a test needs them."""

    def __init__(self, folder: Path, *, tied: bool, fork: bool) -> None:
        self.model_path = tiny_model(folder / "model", tie_embeddings=tied)
        self.run_dir = folder / "run"
        RunFolder(self.run_dir).create_keys()
        # In one process with EngineCore as actors.vllm_engine runs it, or with vLLM's defaults.
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if fork else {}
        self.actor = Peer("forked-actor" if fork else "actor", self.model_path, self.run_dir, **environment)
        self.publishers: list[Peer] = []
        self.actor.hear("ready", START_S)

    def publisher(self, role: str = "publisher") -> tuple[Peer, str]:
        peer = Peer(role, self.model_path, self.run_dir)
        self.publishers.append(peer)
        return peer, peer.hear("endpoint", START_S)["endpoint"]

    def close(self) -> None:
        for peer in (self.actor, *self.publishers):
            peer.kill()

    def update(self, publisher: Peer, version: int) -> None:
        publisher.tell(publish=version)
        self.actor.tell(wait=version)
        assert self.actor.hear("version")["version"] == version
        publisher.hear("published")

    def generate(self, name: str, tokens: int) -> dict[str, Any]:
        self.actor.tell(generate=name, ids=PROMPT, tokens=tokens)
        self.actor.hear("started")
        return self.actor.hear("generated")

    def reference(self, ids: list[int], version: int, weights: Any = variant) -> torch.Tensor:
        """Logprobs of `ids` after PROMPT under the version's weights, by transformers."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model_path)
        with torch.no_grad():
            for parameter, (_, value) in zip(model.parameters(), weights(model, version), strict=True):
                parameter.copy_(value)
            logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    def assert_logprobs_of(
        self, version: int, sampled: dict[str, Any], start: int = 0, end: int | None = None
    ):
        expected = self.reference(sampled["ids"], version)[start:end]
        got = torch.tensor(sampled["logprobs"])[start:end]
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.fixture(scope="module", params=["tied-forked", "untied-spawned"])
def rig(request, tmp_path_factory) -> Iterator[Rig]:
    made = Rig(
        tmp_path_factory.mktemp("weightsync"),
        tied=request.param.startswith("tied"),
        fork=request.param.endswith("forked"),
    )
    yield made
    made.close()


def test_a_request_in_flight_goes_on_under_two_new_versions(rig):
    publisher, endpoint = rig.publisher()
    rig.actor.tell(receive="recompute", endpoint=endpoint)
    rig.update(publisher, 1)
    rig.actor.tell(generate="in-flight", ids=PROMPT, tokens=1500)
    rig.actor.hear("started")
    rig.update(publisher, 2)
    rig.update(publisher, 3)
    sampled = rig.actor.hear("generated")
    assert sampled["finish"] == "length" and len(sampled["ids"]) == 1500
    assert [version for version, _, _ in sampled["spans"]] == [1, 2, 3]
    for version, start, end in sampled["spans"]:
        rig.assert_logprobs_of(version, sampled, start, end)
    # The versions are far enough apart for the comparison to mean something.
    assert (rig.reference(sampled["ids"], 2) - rig.reference(sampled["ids"], 3)).abs().mean() > 0.05


def test_keep_serves_no_prefix_of_older_weights_to_new_requests(rig):
    publisher, endpoint = rig.publisher()
    rig.actor.tell(receive="keep", endpoint=endpoint)
    rig.update(publisher, 4)
    rig.generate("fills-the-cache", 8)
    assert rig.generate("hits-the-cache", 8)["cached"] > 0
    rig.actor.tell(generate="in-flight", ids=PROMPT, tokens=1000)
    rig.actor.hear("started")
    rig.update(publisher, 5)
    sampled = rig.actor.hear("generated")
    assert [version for version, _, _ in sampled["spans"]] == [4, 5] and len(sampled["ids"]) == 1000
    new = rig.generate("new", 20)
    assert new["cached"] == 0
    rig.assert_logprobs_of(5, new)


def test_adapters_that_travel_alone_are_merged_into_the_engines_base_model(rig):
    publisher, endpoint = rig.publisher("adapter-publisher")
    rig.actor.tell(receive="recompute", endpoint=endpoint)
    for version in (1, 2):  # each on top of the base, not of the one before
        rig.update(publisher, version)
        sampled = rig.generate(f"with-adapters-{version}", 20)
        expected = rig.reference(sampled["ids"], version, with_adapters)
        torch.testing.assert_close(torch.tensor(sampled["logprobs"]), expected, atol=1e-3, rtol=0)


def test_m5_a_publisher_killed_in_a_transfer_leaves_the_old_weights_serving(rig):
    publisher, endpoint = rig.publisher()
    rig.actor.tell(receive="recompute", endpoint=endpoint)
    rig.update(publisher, 6)
    publisher.tell(publish=7, die_in_transfer=True)
    publisher.process.wait(ANSWER_S)
    sampled = rig.generate("after-the-kill", 20)
    assert sampled["spans"] == [[6, 0, 20]]
    rig.assert_logprobs_of(6, sampled)
    successor, endpoint = rig.publisher()
    rig.actor.tell(endpoint=endpoint)
    rig.update(successor, 8)
    sampled = rig.generate("after-the-restart", 20)
    assert sampled["spans"] == [[8, 0, 20]]
    rig.assert_logprobs_of(8, sampled)


def test_m5_an_engine_that_failed_to_load_is_reported_broken(rig):
    """Last but one: the engine cannot be used afterwards."""
    _, endpoint = rig.publisher("misshapen-publisher")
    rig.actor.tell(receive="recompute", endpoint=endpoint)
    rig.publishers[-1].tell(publish=9)
    assert "loading weight version 9 failed half way" in rig.actor.hear("broken")["broken"]


def test_a_killed_actor_leaves_no_engine_process(rig):
    """The last of a rig's tests: it ends the engine."""
    children = psutil.Process(rig.actor.process.pid).children(recursive=True)
    assert children
    rig.actor.kill()
    alive = left_alive(children, 60)
    assert alive == [], f"{len(alive)} of {len(children)} processes outlived their actor"
