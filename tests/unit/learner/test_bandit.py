"""Every estimator with every policy loss finds the best arm of a bandit, on and off policy."""

import numpy as np
import pytest
import torch

from learner.advantage import GROUP_RELATIVE, Sample, advantages
from learner.losses import POLICY_LOSSES, Tokens, importance_weights, policy_loss, value_loss
from tests.unit.learner.support import learner_config

REWARDS = np.array([0.1, 0.4, 0.2, 1.0, 0.3])
ESTIMATORS = [*GROUP_RELATIVE, "reinforce_plus_plus", "gae"]
STEPS = 150


def pull(arms, values):
    """One sample for each pull: a single token that earns the arm's reward."""
    turn, nothing = np.zeros(1, dtype=np.int64), np.zeros(0)
    return [
        Sample(0, float(REWARDS[arm]), turn, nothing, np.zeros(1), np.array([value]))
        for arm, value in zip(arms, values, strict=True)
    ]


@pytest.mark.parametrize("stale", [4])  # updates between behaviour and learner
@pytest.mark.parametrize("loss", sorted(set(POLICY_LOSSES) - {"sft"}))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_best_arm_is_found_within_150_steps(estimator, loss, stale):
    config = learner_config(adv_estimator=estimator, policy_loss=loss)
    generator = torch.Generator().manual_seed(0)
    logits, value = torch.zeros(5, requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([logits, value], lr=0.1)
    history = [logits.detach().clone()] * (stale + 1)
    each = torch.arange(8)  # every pull is a sequence of its own
    for _ in range(STEPS):
        behaviour_all = torch.log_softmax(history[-1 - stale], -1)
        arms = torch.multinomial(behaviour_all.exp(), 8, replacement=True, generator=generator)
        result = advantages(pull(arms.tolist(), [value.item()] * 8), config)
        advantage = torch.from_numpy(np.concatenate(result.tokens))
        logprobs, behaviour = torch.log_softmax(logits, -1)[arms], behaviour_all[arms]
        surrogate = policy_loss(Tokens(logprobs, logprobs.detach(), advantage, each), config)
        weights = importance_weights("token", logprobs, behaviour, each, floor=0.5, cap=2.0)
        total = (surrogate.tokens * weights).mean()
        if result.returns is not None:
            returns = torch.from_numpy(np.concatenate(result.returns))
            total = total + value_loss(value.expand(8), value.detach().expand(8), returns, clip=0.0).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        history.append(logits.detach().clone())
    assert torch.softmax(logits, -1)[3] > 0.9
    if estimator == "gae":
        assert value.item() > 0.7  # the critic has followed the policy's value


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dppo"])
def test_a_trust_region_keeps_many_epochs_on_one_batch_near_the_start(loss):
    """50 updates on the same eight pulls: the probability of the best moves, but not to the limit."""
    bounds = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15} if loss == "dppo" else {}
    config = learner_config(policy_loss=loss, adv_estimator="dr_grpo", **bounds)
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    arms = torch.tensor([0, 1, 2, 3, 3, 4, 1, 0])
    advantage = torch.from_numpy(np.concatenate(advantages(pull(arms.tolist(), [0.0] * 8), config).tokens))
    old = torch.log_softmax(logits, -1)[arms].detach()
    for _ in range(50):
        tokens = Tokens(torch.log_softmax(logits, -1)[arms], old, advantage, torch.arange(8))
        optimizer.zero_grad()
        policy_loss(tokens, config).tokens.mean().backward()
        optimizer.step()
    # dppo lets each of the four others lose 0.15 of its 0.2.
    assert 0.2 < torch.softmax(logits, -1)[3] < (0.8 if loss == "dppo" else 0.6)
