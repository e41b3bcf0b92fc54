"""Settings that a config sets and that change nothing: one warning each, so that nobody tunes a dead knob.

Used by `configs.load`. A setting counts as set when it differs from its default.
"""

from __future__ import annotations

from configs.keys import all_keys
from configs.schema import RunConfig

_ONLY_WITH_DATA = (
    "task.tools",
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
    learner = config.learner
    dead: dict[str, str] = {}
    if config.task.mix:
        mixed = (key for key in all_keys() if key.startswith("task.") and key not in _MIX_USES)
        dead.update(dict.fromkeys(mixed, "with task.mix: each recipe of the mix has its own"))
    elif config.task.data is None:
        dead.update(dict.fromkeys(_ONLY_WITH_DATA, "without task.data"))
    else:
        dead.update(dict.fromkeys(_ONLY_WITHOUT_DATA, "with task.data"))
    if learner.kl_coef == 0:
        dead["learner.kl_estimator"] = "with learner.kl_coef = 0"
    if learner.rollout_is == "none":
        dead["learner.rollout_is_cap"] = 'with learner.rollout_is = "none"'
    if learner.warmup_steps >= learner.steps:
        dead["learner.lr_schedule"] = (
            f"with learner.warmup_steps = {learner.warmup_steps} and only {learner.steps} steps"
        )
    return dead


def _get(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
