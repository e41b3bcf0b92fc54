"""Every estimator with every policy loss finds the best arm of a bandit, on and off policy."""

import numpy as np
import pytest
import torch

from learner.advantage import group_advantages
from learner.losses import importance_weights, policy_loss

REWARDS = np.array([0.1, 0.4, 0.2, 1.0, 0.3])


@pytest.mark.parametrize("stale", [0, 4])  # updates between behaviour and learner
@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_the_best_arm_is_found_within_150_steps(estimator, loss, stale):
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    history = [logits.detach().clone()] * (stale + 1)
    for _ in range(150):
        behaviour_all = torch.log_softmax(history[-1 - stale], -1)
        arms = torch.multinomial(behaviour_all.exp(), 8, replacement=True, generator=generator)
        advantages = torch.from_numpy(group_advantages(REWARDS[arms.numpy()], estimator))
        logprobs, behaviour = torch.log_softmax(logits, -1)[arms], behaviour_all[arms]
        result = policy_loss(loss, logprobs, logprobs.detach(), advantages, 0.2, 0.28)
        weights = importance_weights("token", logprobs, behaviour, torch.arange(8), cap=2.0)
        optimizer.zero_grad()
        (result.tokens * weights).mean().backward()
        optimizer.step()
        history.append(logits.detach().clone())
    assert torch.softmax(logits, -1)[3] > 0.9
