"""Learner settings that contradict one another are refused with the reason; idle ones are warned about."""

import pytest

from configs.load import ConfigError, load_config

TWO_UPDATES = ["--learner.minibatches", "2"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["--learner.clip_ratio_c", "1.1"], "dual clip would cut what the clip keeps"),
        (["--learner.policy_loss", "gspo", "--learner.clip_ratio_c", "1.1"], "dual clip would cut"),
        (
            ["--learner.adv_estimator", "maxrl", "--learner.overlong_buffer_tokens", "9"],
            "makes them negative",
        ),
        (
            ["--learner.adv_estimator", "maxrl", "--learner.use_kl_in_reward", "--learner.kl_coef", "0.1"],
            "makes them negative",
        ),
        (["--learner.lora_rank", "4", "--learner.zero_stage", "3"], "cannot publish"),
        (["--learner.compile", "--learner.zero_stage", "3"], "compiles nothing"),
        (["--learner.lora_rank", "4", "--learner.adv_estimator", "gae"], "the critic trains the body"),
        (["--learner.offload", "optimizer"], "zero_stage of at least 1"),
        (["--learner.offload", "all", "--learner.zero_stage", "2"], "zero_stage of at least 3"),
        (["--learner.attention", "flash_attention_2"], "no shared-prefix mask"),
        (["--learner.rollout_is", "token-mask", "--learner.rollout_is_floor", "3"], "leaves nothing below"),
        (["--learner.use_kl_in_reward"], "needs learner.kl_coef above 0"),
        (
            ["--learner.use_kl_in_reward", "--learner.kl_coef", "0.1", "--learner.mask_truncated"],
            "turn one of them off",
        ),
        (["--learner.adv_estimator", "gae", "--learner.mask_truncated"], "critic's values"),
        (
            ["--learner.adv_estimator", "gae", "--learner.adv_norm", "batch"],
            "normalises over the batch by itself",
        ),
        (
            ["--learner.adv_estimator", "reinforce_plus_plus", "--learner.turn_credit", "group"],
            "turns included",
        ),
        (["--learner.overlong_buffer_tokens", "500"], "every one would be punished"),
        (
            ["--task.mix", '[{"config": "code_cpu.toml"}]', "--learner.overlong_buffer_tokens", "50"],
            "each recipe of task.mix has its own",
        ),
        (["--actors.group_size", "1"], "leaves nothing to compare"),
        (["--actors.top_p", "0.9"], "no nucleus"),
        (["--actors.engine", '{"logprobs_mode": "raw_logprobs"}'], "the distribution that was sampled"),
        (["--learner.minibatches", "5"], "does not divide buffer.groups_per_batch"),
        (["--learner.minibatches", "3"], "does not divide buffer.groups_per_batch"),
        (["--learner.clip_ratio_low", "1.5"], "must be"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(None, overrides)


def test_a_group_of_one_is_enough_for_a_critic():
    alone = [
        "--actors.group_size",
        "1",
        "--buffer.min_group_survivors",
        "1",
        "--learner.adv_estimator",
        "gae",
    ]
    with pytest.raises(ConfigError, match="each would be dropped"):
        load_config(None, alone)
    keeps = [*alone, "--buffer.drop_zero_variance", "false"]
    assert load_config(None, keeps).config.actors.group_size == 1


def test_the_longest_answer_of_a_mix_is_not_that_of_the_turns_it_ignores():
    mix = ["--task.mix", '[{"config": "code_cpu.toml"}]', "--task.max_trajectory_tokens", "5000"]
    assert load_config(None, mix).config.task.max_sampled_tokens == 5000
    turns = ["--task.max_turns", "3", "--task.max_tokens_per_turn", "50"]
    assert load_config(None, turns).config.task.max_sampled_tokens == 150


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["--learner.gae_lambda", "0.9"], "gae_lambda"),
        (["--learner.rollout_is_floor", "0.1"], "rollout_is_floor"),
        (["--learner.turn_discount", "0.9"], "turn_discount"),
        (["--learner.overlong_penalty", "0.5"], "overlong_penalty"),
        (["--learner.sapo_tau_pos", "2"], "sapo_tau_pos"),
        (["--learner.clip_ratio_high", "0.5"], "clip_ratio_high"),
        (["--learner.policy_loss", "dppo"], "policy_loss"),
        (
            [*TWO_UPDATES, "--learner.policy_loss", "sapo", "--learner.clip_ratio_high", "0.5"],
            "clip_ratio_high",
        ),
        ([*TWO_UPDATES, "--learner.policy_loss", "cispo", "--learner.clip_ratio_c", "3"], "clip_ratio_c"),
    ],
)
def test_a_setting_without_effect_is_warned_about(overrides, key):
    (warning,) = load_config(None, overrides).warnings
    assert warning.startswith(f"learner.{key} has no effect")
