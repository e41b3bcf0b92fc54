"""Settings of the learner by the name of the paper that proposed them. Called by `configs.load`.

A preset fills in the learner's keys that the config leaves unset; a key that is set wins. The source of
each is in docs/algorithms.md, which a test holds against this table.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Preset = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "maxrl",
    "icepop",
    "decoupled_ppo",
    "scalerl",
]

_AGAINST_SAMPLER = {"rollout_is": "none"}  # the loss's own ratio and bounds are against the sampling policy
_SYMMETRIC = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {
        **_SYMMETRIC,
        "adv_estimator": "gae",
        "policy_loss": "ppo",
        "loss_agg_mode": "token-mean",
        "gae_lambda": 0.95,
        "use_kl_in_reward": True,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
    },
    "grpo": {
        **_SYMMETRIC,
        "adv_estimator": "grpo",
        "policy_loss": "ppo",
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    "dr_grpo": {
        **_SYMMETRIC,
        "adv_estimator": "dr_grpo",
        "policy_loss": "ppo",
        "loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "rloo": {
        "adv_estimator": "rloo",
        "policy_loss": "ppo",
        "loss_agg_mode": "seq-mean-token-sum",
        "use_kl_in_reward": True,
        "kl_coef": 0.03,
        "kl_estimator": "k1",
    },
    "reinforce_plus_plus": {
        **_SYMMETRIC,
        "adv_estimator": "reinforce_plus_plus",
        "policy_loss": "ppo",
        "use_kl_in_reward": True,
        "kl_coef": 0.01,
        "kl_estimator": "k1",
    },
    "reinforce_plus_plus_baseline": {
        **_SYMMETRIC,
        "adv_estimator": "reinforce_plus_plus_baseline",
        "policy_loss": "ppo",
        "kl_coef": 0.01,
        "kl_estimator": "k2",
    },
    "dapo": {
        "adv_estimator": "grpo",
        "policy_loss": "ppo",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "loss_agg_mode": "token-mean",
    },
    "gspo": {
        "adv_estimator": "grpo",
        "policy_loss": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {
        **_AGAINST_SAMPLER,
        "adv_estimator": "grpo",
        "policy_loss": "cispo",
        "clip_ratio_low": 0.99,
        "clip_ratio_high": 4.0,
        "loss_agg_mode": "token-mean",
    },
    "sapo": {
        "adv_estimator": "grpo",
        "policy_loss": "sapo",
        "sapo_tau_pos": 1.0,
        "sapo_tau_neg": 1.05,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "dppo": {
        **_AGAINST_SAMPLER,
        "adv_estimator": "dr_grpo",
        "policy_loss": "dppo",
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.15,
        "loss_agg_mode": "token-mean",
    },
    "maxrl": {"adv_estimator": "maxrl", "policy_loss": "ppo", "loss_agg_mode": "token-mean"},
    "icepop": {"rollout_is": "token-mask", "rollout_is_floor": 0.5, "rollout_is_cap": 5.0},
    "decoupled_ppo": {
        **_SYMMETRIC,
        "policy_loss": "ppo",
        "rollout_is": "token",
        "rollout_is_cap": 5.0,
    },
    "scalerl": {
        **_AGAINST_SAMPLER,
        "adv_estimator": "dr_grpo",
        "adv_norm": "batch",
        "policy_loss": "cispo",
        "clip_ratio_low": 0.99,
        "clip_ratio_high": 4.0,
        "loss_agg_mode": "prompt-mean",
        "fp32_lm_head": True,
    },
}
assert PRESETS.keys() == set(get_args(Preset))


def apply_preset(data: dict[str, Any]) -> None:
    """Complete a config's raw `learner` table by the preset that it names (unknown: pydantic refuses it)."""
    learner = data.get("learner")
    if isinstance(learner, dict) and learner.get("preset") in PRESETS:
        data["learner"] = PRESETS[learner["preset"]] | learner
