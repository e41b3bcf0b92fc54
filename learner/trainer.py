"""The training engine of one rank: a batch in, one optimizer step, metrics out.

Invariants: all ranks call `train_step`, `named_weights` and the checkpoint functions together with the
same batch (they are collectives); the loss is that of the whole optimizer batch, however it is split; an
update with NaN or Inf anywhere changes nothing. Called by `learner.learner`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from buffer.messages import Batch
from configs.schema import LearnerConfig, RunConfig
from learner.batch import BatchSettings, MicroBatch, Plan, plan
from learner.deepspeed_engine import make_engine
from learner.losses import importance_weights, kl_divergence, policy_loss
from learner.policy import Policy, Row, choose_attention, load_policy
from learner.statistics import StepStatistics, batch_metrics
from metrics import names

_MAX_SKIPS_IN_A_ROW = 3
_GATHER_BYTES = 256 * 2**20  # of weights gathered at once under ZeRO-3


class TrainingDiverged(RuntimeError):
    """Several updates in a row had NaN or Inf in loss or gradients."""


class Trainer:
    """Model, DeepSpeed engine and loss. Needs a joined process group (`deepspeed_engine.join_group`)."""

    def __init__(
        self, config: RunConfig, model_path: Path, *, rank: int, world: int, device: Literal["cpu", "cuda"]
    ) -> None:
        learner = config.learner
        self.config: LearnerConfig = learner
        self.rank, self.world = rank, world
        self.model_path = model_path
        self.device = torch.device(device)
        self.skips_in_a_row = 0
        torch.manual_seed(config.seed + rank)
        attention = choose_attention(learner.attention, learner.shared_prefix, device)
        load: dict[str, Any] = {
            "dtype": config.model.dtype,
            "attention_name": attention,
            "temperature": config.actors.temperature,
        }
        self.policy = load_policy(model_path, gradient_checkpointing=learner.gradient_checkpointing, **load)
        self.policy.to(self.device)
        self.engine = make_engine(
            self.policy,
            zero_stage=learner.zero_stage,
            dtype=config.model.dtype,
            lr=learner.lr,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            max_grad_norm=learner.max_grad_norm,
        )
        self.reference: Policy | None = None
        if learner.kl_coef > 0:
            self.reference = load_policy(model_path, **load).to(self.device).eval().requires_grad_(False)
        task = config.task
        self.settings = BatchSettings(
            adv_estimator=learner.adv_estimator,
            loss_agg_mode=learner.loss_agg_mode,
            max_sequence_tokens=min(task.max_turns * task.max_tokens_per_turn, task.max_trajectory_tokens),
            mask_truncated=learner.mask_truncated,
            minibatches=learner.minibatches,
            tokens_per_microbatch=learner.tokens_per_microbatch,
            shared_prefix=learner.shared_prefix,
            world=world,
            hidden_size=self.policy.hf.config.get_text_config().hidden_size,
        )

    # --- training -----------------------------------------------------------------------------

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` (the same on every rank) and return the step's metrics.

        Raises TrainingDiverged after three skipped updates in a row.
        """
        work = plan(batch, self.settings)
        lr = learning_rate(batch.step, self.config)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        statistics = StepStatistics(self.device)
        proximal = self._proximal_logprobs(work)
        skipped, grad_norm = 0, 0.0
        for index, update in enumerate(work.updates):
            for number, micro in enumerate(update.ranks[self.rank]):
                old = proximal[index][number] if proximal else None
                loss = self._loss(micro, old, statistics, first=index == 0)
                self.engine.backward(loss * self.world)  # DeepSpeed averages over ranks
            self.engine.step()
            grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
            skipped += self._note_skip(batch, applied=self.engine.was_step_applied())
        statistics.reduce()
        return {
            names.STEP: float(batch.step),
            names.LR: lr,
            names.GRAD_NORM: grad_norm,
            names.SKIPPED_STEPS: float(skipped),
            names.TOKENS_TRAINED: float(work.tokens_action),
            names.TOKENS_PACKED: float(work.tokens_packed),
            names.TOKENS_UNPACKED: float(work.tokens_unpacked),
            **batch_metrics(batch),
            **statistics.metrics(len(work.updates)),
        }

    def _loss(
        self, micro: MicroBatch, proximal: Tensor | None, statistics: StepStatistics, first: bool
    ) -> Tensor:
        """The micro-batch's part of the update's loss, a scalar."""
        config = self.config
        row = self.policy.row(micro, self.device)
        logprobs, entropy = self.engine(row)
        start = logprobs.detach() if proximal is None else proximal
        old = row.behaviour if config.rollout_is == "none" else start
        surrogate = policy_loss(
            config.policy_loss, logprobs, old, row.advantages, config.clip_ratio_low, config.clip_ratio_high
        )
        per_token = surrogate.tokens
        if config.rollout_is != "none":
            per_token = per_token * importance_weights(
                config.rollout_is, start, row.behaviour, row.sequence_of, config.rollout_is_cap
            )
        kl = self._reference_kl(row, logprobs)
        if kl is not None:
            per_token = per_token + config.kl_coef * kl
        if config.entropy_coef > 0:
            per_token = per_token - config.entropy_coef * entropy
        loss = (row.weights * per_token).sum()
        if micro.weights.any():  # an idle micro-batch has nothing to tell
            statistics.add(loss, entropy, surrogate, kl)
            if first:
                statistics.add_mismatch(start, row.behaviour)
        if torch.isfinite(loss):
            return loss
        # A clamp on the way may have stopped the NaN: gradients must show it, so that all ranks skip.
        return logprobs.sum() * math.nan

    def _reference_kl(self, row: Row, logprobs: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            reference, _ = self.reference(row)
        return kl_divergence(self.config.kl_estimator, logprobs, reference)

    def _proximal_logprobs(self, work: Plan) -> list[list[Tensor]] | None:
        """Logprobs under the weights at the step's start, where an earlier update would change them."""
        if len(work.updates) == 1 or self.config.rollout_is == "none":
            return None
        with torch.no_grad():
            return [
                [self.engine(self.policy.row(micro, self.device))[0] for micro in update.ranks[self.rank]]
                for update in work.updates
            ]

    def _note_skip(self, batch: Batch, applied: bool) -> int:
        if applied:
            self.skips_in_a_row = 0
            return 0
        self.skips_in_a_row += 1
        groups = ", ".join(group[0].group_id for group in batch.groups if group)
        print(
            f"step {batch.step}: NaN or Inf in the gradients, update skipped; groups {groups}",
            file=sys.stderr,
        )
        if self.skips_in_a_row >= _MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self.skips_in_a_row} updates in a row up to step {batch.step} had NaN or Inf in loss or "
                "gradients; lower learner.lr or look at the groups named in the learner's log"
            )
        return 1

    # --- weights ------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every weight, tied ones once; in the model's dtype.

        A collective under ZeRO-3: every rank iterates to the end. A tensor is valid until the next one.
        """
        if self.config.zero_stage < 3:
            for name, parameter in self.policy.hf.named_parameters():
                yield name, parameter.detach()
            return
        import deepspeed

        for bucket in self._buckets():
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()

    def _buckets(self) -> Iterator[list[tuple[str, Any]]]:
        bucket, size = [], 0
        for name, parameter in self.policy.hf.named_parameters():
            size_of_this = math.prod(_whole_shape(parameter)) * parameter.element_size()
            if bucket and size + size_of_this > _GATHER_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, parameter))
            size += size_of_this
        yield bucket

    def weight_metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype without `torch.`, shape) in the order of `named_weights`. Not a collective."""
        return [
            (name, str(parameter.dtype).removeprefix("torch."), _whole_shape(parameter))
            for name, parameter in self.policy.hf.named_parameters()
        ]


def _whole_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves an empty local tensor


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Rate of a step (1 is the first): linear warm-up, then constant or down to a tenth at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    if config.lr_schedule == "linear":
        return config.lr * (1 - 0.9 * done)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
