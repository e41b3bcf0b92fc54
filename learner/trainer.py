"""The training engine of one rank: a batch in, one optimizer step, metrics out.

Invariants: all ranks call `train_step`, `named_weights` and the checkpoint functions together with the
same batch (they are collectives); the loss is that of the whole optimizer batch, however it is split; an
update with NaN or Inf anywhere changes nothing. Called by `learner.learner`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.messages import Batch
from configs.roles import EndsRun
from configs.schema import LearnerConfig, RunConfig
from learner import lora, probe
from learner.batch import BatchSettings, MicroBatch, Plan, plan
from learner.deepspeed_engine import make_engine
from learner.losses import kl_divergence
from learner.objective import Before, objective
from learner.policy import Policy, choose_attention, load_policy
from learner.statistics import StepStatistics, batch_metrics, disagreement
from metrics import names

_MAX_SKIPS_IN_A_ROW = 3  # steps
_GATHER_BYTES = 256 * 2**20  # of weights gathered at once under ZeRO-3


class TrainingDiverged(EndsRun):
    """In several steps in a row every update had NaN or Inf in loss or gradients."""


@dataclass(frozen=True)
class Skipped:
    """An update that was skipped, and the groups it would have trained."""

    step: int
    version: int  # of the weights when the batch was handed out
    groups: tuple[str, ...]


def print_skip(skipped: Skipped) -> None:
    print(
        f"step {skipped.step}: NaN or Inf in loss or gradients, update skipped; "
        f"groups {', '.join(skipped.groups)}",
        file=sys.stderr,
    )


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
        self.on_skip: Callable[[Skipped], None] = print_skip
        torch.manual_seed(config.seed + rank)
        attention = choose_attention(learner.attention, learner.shared_prefix, device)
        load: dict[str, Any] = {
            "dtype": config.model.dtype,
            "attention_name": attention,
            "temperature": config.actors.temperature,
            "fp32_lm_head": learner.fp32_lm_head,
            "compile_blocks": learner.compile,
        }
        self.policy = load_policy(
            model_path,
            gradient_checkpointing=learner.gradient_checkpointing,
            critic=learner.trains_critic,
            **load,
        )
        if learner.lora_rank:
            lora.add_adapters(self.policy.hf, learner)
        self.adapters_travel = bool(learner.lora_rank) and lora.can_travel_alone(self.policy.hf, model_path)
        self.policy.to(self.device)
        self.engine = make_engine(
            self.policy,
            self.policy.parameter_groups(learner.critic_lr),
            zero_stage=learner.zero_stage,
            dtype=config.model.dtype,
            lr=learner.lr,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            max_grad_norm=learner.max_grad_norm,
            offload=learner.offload,
        )
        self.reference: Policy | None = None
        if learner.kl_coef > 0:
            self.reference = load_policy(model_path, **load).to(self.device).eval().requires_grad_(False)
        task = config.task
        self.probe_tokens = task.max_trajectory_tokens - 1  # what an engine takes, with a token to sample
        self.settings = BatchSettings(
            learner=learner,
            max_sequence_tokens=task.max_sampled_tokens,
            world=world,
            hidden_size=self.policy.hf.config.get_text_config().hidden_size,
        )

    # --- training -----------------------------------------------------------------------------

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` (the same on every rank) and return the step's metrics.

        Raises TrainingDiverged after the third step in a row of which every update was skipped.
        """
        config = self.config
        lr = learning_rate(batch.step, config)
        self.engine.optimizer.param_groups[0]["lr"] = lr  # the critic's group keeps its own
        statistics = StepStatistics(self.device)
        work, before = self._look_before(plan(batch, self.settings), statistics)
        skipped, grad_norm = 0, 0.0
        updates = work.updates * config.ppo_epochs
        for number, update in enumerate(updates):
            unmoved = number == 0 and before.proximal is None and config.policy_loss != "sft"
            for micro in update.ranks[self.rank]:
                loss = self._loss(micro, before, statistics, unmoved=unmoved)
                self.engine.backward(loss * self.world)  # DeepSpeed averages over ranks
            self.engine.step()
            grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
            skipped += self._note_skip(batch, applied=self.engine.was_step_applied())
        self._end_if_diverged(batch, all_skipped=0 < skipped == len(updates))
        statistics.reduce()
        metrics = {
            names.STEP: float(batch.step),
            names.LR: lr,
            names.GRAD_NORM: grad_norm,
            names.SKIPPED_STEPS: float(skipped),
            names.TOKENS_TRAINED: float(work.tokens_action),
            names.TOKENS_PACKED: float(work.tokens_packed * config.ppo_epochs),
            names.TOKENS_UNPACKED: float(work.tokens_unpacked * config.ppo_epochs),
            names.IMBALANCE: work.imbalance,
            **batch_metrics(batch),
            **statistics.metrics(len(updates)),
        }
        warning = disagreement(metrics, config)
        if warning and self.rank == 0:
            print(warning, file=sys.stderr, flush=True)
        return metrics | {names.DISAGREE: float(warning is not None)}

    def _loss(self, micro: MicroBatch, before: Before, statistics: StepStatistics, unmoved: bool) -> Tensor:
        """The micro-batch's part of the update's loss, a scalar. `unmoved`: it shows engine against learner,
        since no update came before it."""
        row = self.policy.row(micro, self.device)
        outputs = self.engine(row)
        done = objective(row, outputs, before, self.config)
        if not micro.idle:  # which has nothing to tell
            statistics.add(done, outputs[1])
            if unmoved:
                statistics.add_mismatch(done.start, row.behaviour)
        if torch.isfinite(done.loss):
            return done.loss
        # A clamp on the way may have stopped the NaN: gradients must show it, so that all ranks skip.
        return outputs[0].sum() * math.nan

    @torch.no_grad()
    def _look_before(self, work: Plan, statistics: StepStatistics) -> tuple[Plan, Before]:
        """What the models say of the tokens before the first update, where something needs it, and with it
        the advantages that depend on it."""
        config = self.config
        moves = config.updates_per_step > 1 and config.rollout_is != "none" and config.policy_loss != "sft"
        if not (moves or config.needs_model_outputs or self.reference):
            return work, Before()

        def empty() -> Tensor:
            return torch.zeros(work.tokens_sampled, device=self.device)

        proximal = empty() if moves or config.needs_model_outputs else None
        reference = empty() if self.reference else None
        values = empty()
        for micro in (micro for update in work.updates for micro in update.ranks[self.rank]):
            row = self.policy.row(micro, self.device)
            outputs = self.engine(row) if proximal is not None else None
            of_reference = self.reference(row)[0] if self.reference else None
            if micro.idle:
                continue
            if outputs is not None and proximal is not None:
                proximal[row.token_index], values[row.token_index] = outputs[0], outputs[2]
                statistics.add_mismatch(outputs[0], row.behaviour)
            if of_reference is not None and reference is not None:
                reference[row.token_index] = of_reference
        if proximal is None or not config.needs_model_outputs or not work.samples:
            return work, Before(proximal, reference)
        return self._advise(work, Before(proximal, reference, values))

    def _advise(self, work: Plan, before: Before) -> tuple[Plan, Before]:
        """Advantages from KL in the reward and the critic's values. A collective: a group's members may lie
        on several ranks, so all get all tokens' numbers."""
        config = self.config
        assert before.proximal is not None and before.values is not None
        penalty = torch.zeros_like(before.values)
        if config.use_kl_in_reward and before.reference is not None:
            penalty = config.kl_coef * kl_divergence(config.kl_estimator, before.proximal, before.reference)
        told = torch.stack([penalty, before.values])
        if self.world > 1:
            dist.all_reduce(told)  # each token is on one rank and 0 on the others
        penalty_A, values_A = told.cpu().numpy()
        advantages, returns = work.advantages(config, penalty_A, values_A)
        work = work.with_advantages(advantages)
        if returns is None:
            return work, Before(before.proximal, before.reference)
        targets = torch.from_numpy(returns).to(self.device)
        return work, Before(before.proximal, before.reference, before.values, targets)

    def _note_skip(self, batch: Batch, applied: bool) -> int:
        if not applied:
            self.on_skip(Skipped(batch.step, batch.version, _group_ids(batch)))
        return int(not applied)

    def _end_if_diverged(self, batch: Batch, all_skipped: bool) -> None:
        """One bad batch may spoil all updates of its step: only those of other steps tell of divergence."""
        self.skips_in_a_row = self.skips_in_a_row + 1 if all_skipped else 0
        if self.skips_in_a_row >= _MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self.skips_in_a_row} steps in a row up to step {batch.step} had NaN or Inf in loss or "
                f"gradients of every update (the last: groups {', '.join(_group_ids(batch))}); lower "
                "learner.lr or look at the groups in the run folder's skipped_batches.jsonl"
            )

    # --- weights ------------------------------------------------------------------------------

    def probe(self) -> probe.Probe:
        """What the weights say of a fixed sequence. A collective: every rank calls it."""
        return probe.ask(self.engine, self.policy, self.device, self.probe_tokens)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every weight, tied ones once; in the model's dtype.

        A collective under ZeRO-3: every rank iterates to the end. A tensor is valid until the next one.
        """
        if self.config.lora_rank:
            yield from lora.merged_weights(self.policy.hf)
            return
        if self.config.zero_stage < 3:
            for name, parameter in self.policy.hf.named_parameters():
                yield name, parameter.detach()
            return
        import deepspeed

        for bucket in self._buckets():
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What engines need for a new version: `named_weights`, or the adapters alone. A collective."""
        return lora.adapters(self.policy.hf) if self.adapters_travel else self.named_weights()

    def published_metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype without `torch.`, shape) in the order of `published_weights`. Not a collective."""
        if not self.adapters_travel:
            return self.weight_metadata()
        return [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in lora.adapters(self.policy.hf)
        ]

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
            (lora.plain_name(name), str(parameter.dtype).removeprefix("torch."), _whole_shape(parameter))
            for name, parameter in self.policy.hf.named_parameters()
            if not lora.is_adapter(name)
        ]


def _group_ids(batch: Batch) -> tuple[str, ...]:
    return tuple(group[0].group_id for group in batch.groups if group)


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
