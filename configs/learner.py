"""The `[learner]` section: algorithm, step and checkpoints. Imported by `configs.schema` as a part of it.

Invariant: combinations without a meaning within the section are refused here, with the reason.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from configs.presets import Preset
from configs.section import SECTION, Fraction, Positive, Seconds


class LearnerConfig(BaseModel):
    model_config = SECTION

    count: Positive = 1
    """Data-parallel ranks."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Linear warm-up; constant or as `lr_schedule` says afterwards."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to 10 % at the last step unless constant."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clipping."""
    preset: Preset | None = None
    """Settings of a paper by its name, for the keys not set: docs/algorithms.md lists what each sets."""
    adv_estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "maxrl",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
    ] = "grpo"
    """How rewards become advantages; gae trains a critic."""
    adv_norm: Literal["none", "batch"] = "none"
    """batch: divide advantages by their standard deviation over the batch's trajectories."""
    turn_credit: Literal["trajectory", "discounted", "group"] = "trajectory"
    """A turn's advantage: the trajectory's, discounted by the turns after it, or the turn's in the group."""
    turn_discount: Fraction = 1.0
    """Per turn, with turn_credit discounted or group."""
    gae_gamma: Fraction = 1.0
    """Discount per token, with adv_estimator gae."""
    gae_lambda: Fraction = 1.0
    """GAE's lambda; 1 is the return minus the critic's value."""
    critic_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the value head, constant."""
    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the critic's loss, which also trains the body under its head."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far a value may move in a step before its loss is the clipped one; 0 for no clipping."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """The last tokens of the length limit over which a reward falls (DAPO); 0 is off."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """What a trajectory at the length limit loses, with overlong_buffer_tokens."""
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo", "dppo", "sft"] = "ppo"
    """The surrogate; docs/algorithms.md has the formulas. sft ignores rewards."""
    clip_ratio_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clip: ratios below 1 - this (dppo: probabilities lower by this)."""
    clip_ratio_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper clip: ratios above 1 + this (dppo: probabilities higher by this)."""
    clip_ratio_c: Annotated[float, Field(ge=0)] = 0.0
    """Dual clip of ppo and gspo: most of the ratio where the advantage is negative; 0 is off, 3 is usual."""
    sapo_tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """Sharpness of sapo's gate for positive advantages."""
    sapo_tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """Sharpness of sapo's gate for negative advantages."""
    loss_agg_mode: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ] = "token-mean"
    """How token losses become one number."""
    rollout_is: Literal["none", "token", "sequence", "token-mask", "sequence-mask"] = "token"
    """Importance weights of learner against engine: truncated at the cap, or (mask) 0 outside the bounds."""
    rollout_is_cap: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of those weights."""
    rollout_is_floor: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of the masks."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the initial model in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the reward of each token instead of adding it to the loss."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Entropy bonus."""
    mask_truncated: bool = False
    """Give trajectories cut by a limit no weight in the loss."""
    minibatches: Positive = 1
    """Optimizer updates per pass over a batch; a step is one batch."""
    ppo_epochs: Positive = 1
    """Passes over a batch."""
    logprob_gap_warn: Annotated[float, Field(gt=0)] = 0.2
    """Mean |learner - engine| logprob above which the learner warns that the two disagree."""
    fp32_lm_head: bool = False
    """Multiply hidden states and LM head in float32."""
    tokens_per_microbatch: Positive = 4096
    """Packed tokens of one forward and backward."""
    shared_prefix: bool = True
    """Compute the prompt that a group shares once (exact); needs `attention = "sdpa"`."""
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """auto: sdpa, or flash_attention_2 on CUDA with shared_prefix off and flash-attn installed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Train low-rank adapters of this rank instead of the weights; 0 trains the weights."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """Adapters are scaled by this over their rank."""
    lora_targets: list[str] = ["all-linear"]
    """Linear layers with an adapter, by the end of their names, e.g. q_proj."""
    lora_export: Literal["merged", "adapter"] = "merged"
    """export/ is a whole model, or the adapter alone for peft and vLLM."""
    compile: bool = False
    """torch.compile of the feed-forward blocks (attention is laid out anew for each row)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """On CUDA: keep the optimizer's state, or with ZeRO-3 the weights too, in main memory."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage."""
    threads: int = 0
    """CPU threads per rank; 0 shares the cores between roles."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints (the last step always makes one)."""
    checkpoint_keep: Positive = 2
    """Newest checkpoints kept; a run can be resumed from these."""
    checkpoint_keep_best: Annotated[int, Field(ge=0)] = 0
    """Besides, those with the highest mean reward on the way to them."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of the learner from its last checkpoint before the run stops."""
    timeout_s: Seconds = 600
    """Deadline of every wait for a batch or a collective."""

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.ppo_epochs

    @property
    def trains_critic(self) -> bool:
        return self.adv_estimator == "gae" and self.policy_loss != "sft"

    @property
    def needs_model_outputs(self) -> bool:
        """Advantages depend on logprobs or values of the learner's own model."""
        return self.policy_loss != "sft" and (self.use_kl_in_reward or self.adv_estimator == "gae")

    @model_validator(mode="after")
    def _refuse_what_has_no_meaning(self) -> LearnerConfig:
        if self.policy_loss in ("ppo", "gspo") and 0 < self.clip_ratio_c <= 1 + self.clip_ratio_high:
            raise ValueError(
                f"learner.clip_ratio_c = {self.clip_ratio_c} must be above 1 + clip_ratio_high = "
                f"{1 + self.clip_ratio_high:g}, or the dual clip would cut what the clip keeps; 3 is usual"
            )
        if self.rollout_is.endswith("-mask") and self.rollout_is_floor >= self.rollout_is_cap:
            raise ValueError(
                f"learner.rollout_is_floor = {self.rollout_is_floor} leaves nothing below rollout_is_cap = "
                f"{self.rollout_is_cap}; lower the floor below 1 and keep the cap above it"
            )
        if self.adv_estimator == "maxrl" and (self.use_kl_in_reward or self.overlong_buffer_tokens):
            what = "use_kl_in_reward" if self.use_kl_in_reward else "overlong_buffer_tokens"
            raise ValueError(
                "adv_estimator 'maxrl' reads rewards as probabilities of success, and learner."
                f"{what} makes them negative; turn it off or choose grpo"
            )
        if self.use_kl_in_reward and self.kl_coef == 0:
            raise ValueError(
                "learner.use_kl_in_reward needs learner.kl_coef above 0, or no KL enters the reward"
            )
        if self.use_kl_in_reward and self.mask_truncated:
            raise ValueError(
                "learner.use_kl_in_reward needs the KL of every trajectory, and learner.mask_truncated "
                "leaves some out of the forward pass; turn one of them off"
            )
        if self.adv_estimator == "gae" and self.mask_truncated:
            raise ValueError(
                'adv_estimator = "gae" needs the critic\'s values of every trajectory, and '
                "learner.mask_truncated leaves some out of the forward pass; turn it off"
            )
        if self.lora_rank and self.zero_stage == 3:
            raise ValueError(
                "learner.lora_rank with learner.zero_stage = 3 cannot publish: merging an adapter needs "
                "whole weights; take stage 0 to 2 (adapters leave little to partition)"
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "learner.compile with learner.zero_stage = 3 compiles nothing: the graph breaks wherever "
                "DeepSpeed gathers a weight; take stage 0 to 2 or compile = false"
            )
        if self.lora_rank and self.adv_estimator == "gae":
            raise ValueError(
                "learner.lora_rank with adv_estimator gae: the critic trains the body, which adapters "
                "freeze; take another estimator or lora_rank = 0"
            )
        if self.offload != "none" and self.zero_stage < (3 if self.offload == "all" else 1):
            raise ValueError(
                f"learner.offload = {self.offload!r} needs learner.zero_stage of at least "
                f"{3 if self.offload == 'all' else 1}"
            )
        batch_wide = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        if self.adv_estimator in batch_wide and self.adv_norm != "none":
            raise ValueError(
                f"adv_estimator {self.adv_estimator!r} normalises over the batch by itself; "
                'set learner.adv_norm = "none"'
            )
        if self.adv_estimator in ("gae", "reinforce_plus_plus") and self.turn_credit != "trajectory":
            raise ValueError(
                f"adv_estimator {self.adv_estimator!r} gives each token the return after it, turns included; "
                f'set learner.turn_credit = "trajectory" or take grpo, dr_grpo, rloo or maxrl'
            )
        return self
