"""The loop against a fake buffer, publisher and clients; the trainer is real and tiny."""

import dataclasses
import json
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from buffer.messages import (
    AnnouncePublisher,
    BatchReply,
    Checkpointed,
    CommitStep,
    GetBatch,
    Heartbeat,
    HeartbeatAck,
    Ok,
    Resume,
)
from configs.roles import RoleSpec
from learner.feed import BatchFeed
from learner.heartbeat import HeartbeatThread
from learner.learner import Learner
from learner.trainer import Trainer
from metrics import names
from tests.unit.learner.support import random_batch, run_config


class FakeBuffer:
    """Answers every client at once and keeps what it was asked, in order."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.asked = threading.Semaphore(0)  # one permit for each GetBatch
        self.refuse: type | None = None
        self.empty_replies = 0

    def connect(self, _purpose: str = "") -> "FakeClient":
        return FakeClient(self)

    def of(self, *kinds: type) -> list[object]:
        return [m for m in self.messages if isinstance(m, kinds)]


class FakeClient:
    def __init__(self, buffer: FakeBuffer) -> None:
        self.buffer, self.closed = buffer, False

    def call(self, message: object, timeout_s: float) -> object:
        self.buffer.messages.append(message)
        if self.buffer.refuse and isinstance(message, self.buffer.refuse):
            raise ConnectionError("the buffer is gone")
        if isinstance(message, GetBatch):
            self.buffer.asked.release()
            if self.buffer.empty_replies:
                self.buffer.empty_replies -= 1
                return BatchReply(None, waits_for="actor-0 is paused: search is down")
            return BatchReply(batch=random_batch(step=message.step, seed=message.step))
        if isinstance(message, Heartbeat):
            return HeartbeatAck(version=0, publisher=None, lost=(), drain=False, finished=False)
        return Ok()

    def close(self) -> None:
        self.closed = True


class FakePublisher:
    endpoint = "tcp://here:1"

    def __init__(self) -> None:
        self.published: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.probed: list[int] = []  # versions
        self.closed = False

    def publish(self, version, named_tensors, probe) -> None:
        if probe[0]:
            self.probed.append(version)
        self.published.append((version, {name: tensor.clone() for name, tensor in named_tensors}))

    def metrics(self) -> dict[str, float]:
        return {names.SYNC_VERSION: 1.0}

    def close(self) -> None:
        self.closed = True


def train(model_folder: Path, run_dir: Path, steps: int, **sections):
    """Run a learner to `steps`; return what the buffer heard and the publisher got."""
    config = run_config(steps=steps, checkpoint_every=2)
    config = config.model_validate(config.model_dump() | sections)
    spec = RoleSpec(
        role="learner",
        name="learner-0",
        rank=0,
        world=1,
        config=config,
        run_dir=run_dir,
        run_id="run",
        config_dir=run_dir,
        model_path=model_folder,
        num_prompts=1,
        buffer_endpoint="",
        device="cpu",
        threads=1,
    )
    buffer, publisher = FakeBuffer(), FakePublisher()
    with ExitStack() as stack:
        heartbeat = HeartbeatThread(buffer.connect, spec.name, 60.0, 5.0)
        stack.callback(heartbeat.close)
        trainer = Trainer(config, model_folder, rank=0, world=1, device="cpu")
        Learner(spec, trainer, heartbeat, stack, buffer.connect, lambda _: publisher).run()
    return buffer, publisher, trainer


@pytest.mark.usefixtures("process_group")
def test_a_run_trains_publishes_commits_checkpoints_and_exports(model_folder, tmp_path):
    buffer, publisher, trainer = train(model_folder, tmp_path, steps=3)
    assert buffer.of(Resume, AnnouncePublisher, CommitStep) == [
        Resume(step=0, version=0),
        AnnouncePublisher(endpoint="tcp://here:1"),
        CommitStep(step=1, version=1),
        CommitStep(step=2, version=2),
        CommitStep(step=3, version=3),
    ]
    # Written in the background: reported when complete, in order, the last before the end.
    assert buffer.of(Checkpointed) == [
        Checkpointed(step=2, oldest_step=2),
        Checkpointed(step=3, oldest_step=2),
    ]
    assert [version for version, _ in publisher.published] == [1, 2, 3]
    for name, tensor in trainer.named_weights():
        assert torch.equal(publisher.published[-1][1][name], tensor)
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert publisher.closed
    beats = [m for m in buffer.messages if isinstance(m, Heartbeat)]
    assert [b.metrics[names.STEP] for b in beats if names.STEP in b.metrics] == [1, 2, 3]
    assert all(names.WAIT_S in b.metrics for b in beats if names.STEP in b.metrics)
    assert (beats[-1].state, beats[-1].version) == ("finished", 3)


@pytest.mark.usefixtures("process_group")
def test_m2_a_second_learner_goes_on_after_the_checkpoint_and_publishes_its_version(model_folder, tmp_path):
    train(model_folder, tmp_path, steps=2)
    buffer, publisher, _ = train(model_folder, tmp_path, steps=4)
    assert buffer.of(Resume) == [Resume(step=2, version=2)]
    assert [m.step for m in buffer.of(GetBatch)] == [3, 4]
    assert [version for version, _ in publisher.published] == [2, 3, 4]


@pytest.mark.usefixtures("process_group")
def test_m3_a_rank_whose_publisher_fails_still_takes_part_in_the_whole_gather(
    model_folder, tmp_path, monkeypatch
):
    gathered: list[str] = []

    def weights(trainer):
        for name, tensor in trainer.named_weights():
            yield name, tensor
            gathered.append(name)

    def fail(_publisher, _version, named_tensors, _probe):
        next(iter(named_tensors))
        raise RuntimeError("the weight publisher failed")

    monkeypatch.setattr(Trainer, "published_weights", weights)
    monkeypatch.setattr(FakePublisher, "publish", fail)
    with pytest.raises(RuntimeError, match="the weight publisher failed"):
        train(model_folder, tmp_path, steps=1)
    whole = Trainer(run_config(), model_folder, rank=0, world=1, device="cpu").weight_metadata()
    assert gathered == [name for name, _, _ in whole]


@pytest.mark.usefixtures("process_group")
def test_the_first_version_and_every_nth_after_it_goes_with_a_probe(model_folder, tmp_path):
    _, publisher, _ = train(model_folder, tmp_path, steps=4, weightsync={"probe_every": 3})
    assert publisher.probed == [1, 4]
    (tmp_path / "none").mkdir()
    _, publisher, _ = train(model_folder, tmp_path / "none", steps=1, weightsync={"probe_every": 0})
    assert publisher.probed == []


@pytest.mark.usefixtures("process_group")
def test_only_every_nth_step_publishes_a_version(model_folder, tmp_path):
    buffer, publisher, _ = train(
        model_folder, tmp_path, steps=3, weightsync={"every": 2}, buffer={"max_staleness": 2}
    )
    assert [version for version, _ in publisher.published] == [1]
    assert [(m.step, m.version) for m in buffer.of(CommitStep)] == [(1, 0), (2, 1), (3, 1)]


@pytest.mark.usefixtures("process_group")
def test_the_ids_of_a_skipped_batch_are_kept(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("learner.trainer.objective", spoilt())
    train(model_folder, tmp_path, steps=1)
    (line,) = (tmp_path / "skipped_batches.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "version": 0, "groups": ["g0", "g1", "g2"]}


def spoilt():
    """The objective, with a loss that is no number."""
    import learner.objective

    right = learner.objective.objective
    return lambda *arguments: dataclasses.replace(right(*arguments), loss=torch.tensor(float("nan")))


# --- the feed ---------------------------------------------------------------------------------


def test_the_next_batch_is_fetched_before_it_is_asked_for():
    buffer = FakeBuffer()
    feed = BatchFeed(buffer.connect, first=1, last=2, timeout_s=5)
    assert feed.get(1).step == 1
    assert buffer.asked.acquire(timeout=5) and buffer.asked.acquire(timeout=5)  # 1 and, unasked, 2
    assert feed.get(2).step == 2
    with pytest.raises(ValueError, match="beyond the last step"):
        feed.get(3)
    feed.close()
    assert [m.step for m in buffer.of(GetBatch)] == [1, 2]


def test_an_empty_reply_is_asked_again():
    buffer = FakeBuffer()
    buffer.empty_replies = 3
    feed = BatchFeed(buffer.connect, first=1, last=1, timeout_s=5)
    assert feed.get(1).step == 1
    feed.close()
    assert len(buffer.of(GetBatch)) == 4


def test_no_batch_by_the_deadline_names_step_setting_and_what_is_missing():
    buffer = FakeBuffer()
    buffer.empty_replies = 10**9
    feed = BatchFeed(buffer.connect, first=1, last=1, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"no batch for step 1 within learner\.timeout_s .*search is down"):
        feed.get(1)
    feed.close()


def test_an_error_of_the_feed_reaches_the_loop():
    buffer = FakeBuffer()
    buffer.refuse = GetBatch
    feed = BatchFeed(buffer.connect, first=1, last=1, timeout_s=5)
    with pytest.raises(ConnectionError):
        feed.get(1)
    feed.close()


# --- the heartbeat ----------------------------------------------------------------------------


def test_every_report_is_sent_even_at_the_end():
    buffer = FakeBuffer()
    heartbeat = HeartbeatThread(buffer.connect, "learner-0", interval_s=60, timeout_s=5)
    for step in range(5):
        heartbeat.report(step, {"step": float(step)})
    heartbeat.close()
    assert [m.metrics["step"] for m in buffer.of(Heartbeat) if m.metrics] == [0, 1, 2, 3, 4]


def test_an_error_of_the_heartbeat_reaches_the_loop():
    buffer = FakeBuffer()
    buffer.refuse = Heartbeat
    heartbeat = HeartbeatThread(buffer.connect, "learner-0", interval_s=60, timeout_s=5)
    heartbeat.close()
    with pytest.raises(ConnectionError):
        heartbeat.check()
