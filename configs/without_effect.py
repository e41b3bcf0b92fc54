"""Settings that a config sets and that change nothing: one warning each, so that nobody tunes a dead knob.

Used by `configs.load`. A setting counts as set when it differs from its default.
"""

from __future__ import annotations

import json

from configs.keys import all_keys
from configs.learner import LearnerConfig
from configs.presets import PRESETS
from configs.schema import RunConfig

_ONLY_WITH_DATA = (
    "task.tools",
    "task.tools_field",
    "task.tools_answer",
    "task.rewards",
    "task.prompt",
    "task.system",
    "task.examples",
    "task.parser",
    "task.parser_options",
    "task.held_out",
    "task.data_split",
)
_MIX_USES = ("task.mix", "task.max_trajectory_tokens")
_ONLY_WITHOUT_DATA = ("task.name", "task.options")


def settings_without_effect(config: RunConfig) -> tuple[str, ...]:
    """One sentence for each setting that has no effect beside the others."""
    changed = {name for name, key in all_keys().items() if _get(config, name) != key.default}
    return tuple(
        f"{name} has no effect {reason}" for name, reason in _dead(config).items() if name in changed
    )


def _dead(config: RunConfig) -> dict[str, str]:
    """Keys that the other settings switch off, and why."""
    dead: dict[str, str] = {}
    if config.task.mix:
        mixed = (key for key in all_keys() if key.startswith("task.") and key not in _MIX_USES)
        dead.update(dict.fromkeys(mixed, "with task.mix: each recipe of the mix has its own"))
    elif config.task.data is None:
        dead.update(dict.fromkeys(_ONLY_WITH_DATA, "without task.data"))
    else:
        dead.update(dict.fromkeys(_ONLY_WITHOUT_DATA, "with task.data"))
        if not config.task.tools_field:
            dead["task.tools_answer"] = "without task.tools_field"
    if not config.judge.serve:
        dead.update(dict.fromkeys(("judge.gpus", "judge.options"), "without judge.serve"))
    if config.eval.every_steps == 0:
        dead["eval.every_prompts"] = "with eval.every_steps = 0"
    elif config.eval.every_steps >= config.learner.steps:
        dead["eval.every_steps"] = f"with only learner.steps = {config.learner.steps}"
    if config.weightsync.probe_every == 0:
        dead["weightsync.probe_tolerance"] = "with weightsync.probe_every = 0"
    if config.weightsync.backend in ("shm", "disk"):
        backend = config.weightsync.backend
        dead["weightsync.bucket_mb"] = f'with weightsync.backend = "{backend}": a version is one piece there'
    from_preset = PRESETS.get(config.learner.preset or "", {})
    for name, reason in _dead_of_learner(config.learner).items():
        if name not in from_preset:
            dead[f"learner.{name}"] = reason
    return dead


def _dead_of_learner(learner: LearnerConfig) -> dict[str, str]:
    """The same for `[learner]`, without the section's name."""
    dead: dict[str, str] = {}

    def unless(alive: bool, reason: str, *names: str) -> None:
        if not alive:
            dead.update(dict.fromkeys(names, reason))

    unless(learner.kl_coef > 0, "with learner.kl_coef = 0", "kl_estimator")
    unless(learner.rollout_is != "none", 'with learner.rollout_is = "none"', "rollout_is_cap")
    unless(learner.rollout_is.endswith("-mask"), "unless learner.rollout_is is a mask", "rollout_is_floor")
    unless(
        learner.adv_estimator == "gae",
        'without learner.adv_estimator = "gae"',
        *("gae_gamma", "gae_lambda", "critic_lr", "value_coef", "value_clip"),
    )
    unless(learner.turn_credit != "trajectory", 'with learner.turn_credit = "trajectory"', "turn_discount")
    unless(learner.overlong_buffer_tokens > 0, "with learner.overlong_buffer_tokens = 0", "overlong_penalty")
    unless(learner.lora_rank > 0, "with learner.lora_rank = 0", "lora_alpha", "lora_targets", "lora_export")
    named = f"with learner.policy_loss = {json.dumps(learner.policy_loss)}"
    unless(learner.policy_loss == "sapo", named, "sapo_tau_pos", "sapo_tau_neg")
    unless(
        learner.updates_per_step > 1 or learner.rollout_is == "none" or learner.policy_loss == "sft",
        "with one update a step and learner.rollout_is other than none: its ratio is 1, so every policy_loss "
        "is the same policy gradient; raise learner.minibatches or learner.ppo_epochs",
        *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "sapo_tau_pos", "sapo_tau_neg", "policy_loss"),
    )
    unless(learner.policy_loss in ("ppo", "gspo"), named, "clip_ratio_c")
    unless(learner.policy_loss not in ("sapo", "sft"), named, "clip_ratio_low", "clip_ratio_high")
    unless(
        learner.policy_loss != "sft",
        named,
        *("adv_norm", "turn_credit", "turn_discount", "rollout_is", "rollout_is_cap", "rollout_is_floor"),
        *("overlong_buffer_tokens", "overlong_penalty", "logprob_gap_warn"),
    )
    unless(
        learner.warmup_steps < learner.steps,
        f"with learner.warmup_steps = {learner.warmup_steps} and only {learner.steps} steps",
        "lr_schedule",
    )
    return dead


def _get(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
