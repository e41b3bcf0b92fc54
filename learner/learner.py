"""One learner process: train batches from the buffer, publish weights, commit, checkpoint, export.

Invariant: a batch is committed only after its optimizer step, and after a crash the run goes on from the
last checkpoint with exactly the batches after it; so the surviving weights have seen each batch once.
Rank 0 talks for all; every rank gets the same batches. Started by `launch.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.client import BufferClient
from buffer.messages import AnnouncePublisher, Checkpointed, CommitStep, Resume
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from learner import checkpoint
from learner.checkpoint import Progress
from learner.checkpointer import Checkpointer
from learner.deepspeed_engine import join_group
from learner.feed import BatchFeed, Client
from learner.heartbeat import HeartbeatThread
from learner.memory import trim
from learner.probe import Probe
from learner.trainer import Skipped, Trainer, print_skip
from metrics import names
from weightsync.publisher import Publisher

Metadata = list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape of every weight


class PublisherLike(Protocol):
    """What the loop needs of `weightsync.publisher.Publisher`."""

    endpoint: str

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], probe: Probe = ((), ())
    ) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def main(spec: RoleSpec) -> None:
    """Train from the last checkpoint to `learner.steps`, then export. Returns on a clean end."""
    config = spec.config.learner
    torch.set_num_threads(spec.threads)

    def connect(purpose: str) -> Client:
        keys = RunFolder(spec.run_dir).read_keys()
        return BufferClient(spec.buffer_endpoint, keys, role="learner", name=f"{spec.name}/{purpose}")

    def make_publisher(metadata: Metadata) -> Publisher:
        return Publisher(spec, metadata, RunFolder(spec.run_dir).read_keys())

    with ExitStack() as stack:
        heartbeat = HeartbeatThread(
            lambda: connect("heartbeat"), spec.name, spec.config.buffer.heartbeat_s, config.timeout_s
        )
        stack.callback(heartbeat.close)
        join_group(spec.rank, spec.world, spec.master, spec.device, config.timeout_s)
        stack.callback(dist.destroy_process_group)
        trainer = Trainer(spec.config, spec.model_path, rank=spec.rank, world=spec.world, device=spec.device)
        Learner(spec, trainer, heartbeat, stack, connect, make_publisher).run()


class Learner:
    """The loop over steps and what follows each.

    `connect` makes a client of the buffer for one purpose, that is for one thread; `make_publisher` is called
    on rank 0 only; `stack` closes what is opened here.
    """

    def __init__(
        self,
        spec: RoleSpec,
        trainer: Trainer,
        heartbeat: HeartbeatThread,
        stack: ExitStack,
        connect: Callable[[str], Client],
        make_publisher: Callable[[Metadata], PublisherLike],
    ) -> None:
        self.config = spec.config
        self.trainer, self.heartbeat = trainer, heartbeat
        self.folder = RunFolder(spec.run_dir)
        self.leads = spec.rank == 0
        self.client = stack.enter_context(closing(connect("main")))
        config = self.config.learner
        self.checkpointer = stack.enter_context(
            closing(
                Checkpointer(
                    trainer, self.folder.checkpoints, config.checkpoint_keep, config.checkpoint_keep_best
                )
            )
        )
        self.rewards: list[float] = []  # of the steps since the last checkpoint
        trainer.on_skip = self._note_skip
        found = checkpoint.latest(self.folder.checkpoints)
        self.progress = checkpoint.restore(trainer, found) if found else Progress()
        self.publishes = 0
        self.publisher: PublisherLike | None = None
        if self.leads:
            self._call(Resume(step=self.progress.step, version=self.progress.version))
            self.publisher = stack.enter_context(closing(make_publisher(trainer.published_metadata())))
            self._call(AnnouncePublisher(endpoint=self.publisher.endpoint))
        dist.barrier()  # no rank may ask for a batch before the buffer knows where to resume
        if self.progress.version:
            self._publish(self.progress.version)  # actors may have loaded weights that died with the crash
        first, last = self.progress.step + 1, self.config.learner.steps
        feed = BatchFeed(lambda: connect("feed"), first, last, self.config.learner.timeout_s)
        self.feed = stack.enter_context(closing(feed))

    def run(self) -> None:
        """Train every step that is left, export, and say so."""
        self.heartbeat.report(self.progress.version, {})
        for step in range(self.progress.step + 1, self.config.learner.steps + 1):
            self._step(step)
        self._report_checkpoint(self.checkpointer.finish())
        checkpoint.export(self.trainer, self.folder.export)
        self.heartbeat.report(self.progress.version, {}, state="finished")

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        batch = self.feed.get(step)
        waited = time.perf_counter()
        metrics = self.trainer.train_step(batch)
        trained = time.perf_counter()
        version = self.progress.version
        if step % self.config.weightsync.every == 0:
            version += 1
            self._publish(version)
        published = time.perf_counter()
        self.progress = Progress(step, version)
        if self.leads:
            self._call(CommitStep(step=step, version=version))
        self.rewards.append(metrics[names.REWARD_MEAN])
        self._checkpoint_if_due(step)
        trim()
        metrics |= {
            names.WAIT_S: waited - started,
            names.TRAIN_S: trained - waited,
            names.PUBLISH_S: published - trained,
            names.STEP_S: time.perf_counter() - started,
        }
        if self.publisher is not None:
            metrics |= self.publisher.metrics()
            self.heartbeat.report(version, metrics)
        self.heartbeat.check()

    def _publish(self, version: int) -> None:
        every = self.config.weightsync.probe_every
        probe = self.trainer.probe() if every and self.publishes % every == 0 else ((), ())
        self.publishes += 1
        weights = self.trainer.published_weights()
        try:
            if self.publisher is not None:
                self.publisher.publish(version, weights, probe)
        finally:
            for _ in weights:  # a collective under ZeRO-3, which no rank leaves early, whatever fails
                pass

    def _checkpoint_if_due(self, step: int) -> None:
        """Report a checkpoint that has become complete; start one if it is time."""
        self._report_checkpoint(self.checkpointer.poll())
        config = self.config.learner
        if step % config.checkpoint_every and step != config.steps:
            return
        self._report_checkpoint(self.checkpointer.start(self.progress, fmean(self.rewards)))
        self.rewards.clear()

    def _report_checkpoint(self, step: int | None) -> None:
        if step is not None and self.leads:
            self._call(Checkpointed(step=step, oldest_step=self.checkpointer.oldest_step()))

    def _note_skip(self, skipped: Skipped) -> None:
        """Keep the ids of a batch that gave NaN or Inf, so that one can look at it."""
        if self.leads:
            with (self.folder.root / "skipped_batches.jsonl").open("a") as file:
                file.write(json.dumps(asdict(skipped)) + "\n")
        print_skip(skipped)

    def _call(self, message: object) -> object:
        return self.client.call(message, timeout_s=self.config.learner.timeout_s)
