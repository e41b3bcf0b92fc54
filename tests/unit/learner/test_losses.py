import math

import numpy as np
import pytest
import torch

from learner.losses import importance_weights, kl_divergence, policy_loss, token_weights


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


def ppo_at(ratio, advantage):
    logprob = tensor(math.log(ratio)).requires_grad_()
    result = policy_loss("ppo", logprob, tensor(0.0), tensor(advantage), clip_low=0.2, clip_high=0.3)
    result.tokens.sum().backward()
    assert logprob.grad is not None
    return result.tokens.item(), logprob.grad.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.6, 0.0, True),  # above 1.3 with A > 0: no more reason to raise it
        (0.5, 2.0, -1.0, -1.0, False),  # below 0.8 with A > 0: the pessimistic branch keeps its gradient
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_ppo_clips_on_the_side_that_its_advantage_pushes_to(ratio, advantage, loss, gradient, clipped):
    got = ppo_at(ratio, advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-6)
    assert got[2] is clipped


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    logprobs = tensor(math.log(2.0), math.log(0.5), math.log(1.1)).requires_grad_()
    result = policy_loss("cispo", logprobs, torch.zeros(3), tensor(1.0, 1.0, -2.0), 0.2, 0.3)
    result.tokens.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.3, -0.8, 2.2])
    assert result.clipped.tolist() == [True, True, False]


def test_token_importance_weights_are_truncated():
    got = importance_weights("token", tensor(0.0, 0.0, 0.0), tensor(-5.0, 0.0, 1.0), torch.arange(3), cap=2.0)
    assert got.tolist() == pytest.approx([2.0, 1.0, math.exp(-1)])


def test_sequence_importance_weights_multiply_over_the_sequence():
    proximal = tensor(0.1, 0.2, -1.0, 0.3)
    got = importance_weights("sequence", proximal, torch.zeros(4), torch.tensor([7, 7, 2, 7]), cap=1.7)
    assert got.tolist() == pytest.approx([1.7, 1.7, math.exp(-1.0), 1.7])  # exp(0.6) = 1.82 is over the cap


def test_importance_weights_carry_no_gradient_and_stay_finite():
    proximal = tensor(0.0, -1000.0).requires_grad_()
    got = importance_weights("token", proximal, tensor(-1000.0, 0.0), torch.arange(2), cap=2.0)
    assert not got.requires_grad
    assert got.tolist() == [2.0, 0.0]


def test_t9_an_unchanged_policy_has_ratio_and_weight_one():
    logprobs = tensor(-0.5, -3.0)
    assert policy_loss("ppo", logprobs, logprobs, tensor(1.0, -1.0), 0.2, 0.28).ratio.tolist() == [1.0, 1.0]
    weights = importance_weights("sequence", logprobs, logprobs, torch.zeros(2, dtype=torch.int64), 2.0)
    assert weights.tolist() == [1.0, 1.0]


def test_kl_estimators():
    logprobs, reference = tensor(-1.0, -2.0), tensor(-1.5, -1.0)
    assert kl_divergence("k1", logprobs, reference).tolist() == pytest.approx([0.5, -1.0])
    assert kl_divergence("k2", logprobs, reference).tolist() == pytest.approx([0.125, 0.5])
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert kl_divergence("k3", logprobs, reference).tolist() == pytest.approx(expected)


def test_k2_has_the_gradient_of_the_kl_in_expectation():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    expected_k2 = (logprobs.exp().detach() * kl_divergence("k2", logprobs, reference)).sum()
    (got,) = torch.autograd.grad(expected_k2, logits)
    torch.testing.assert_close(got, wanted)


def test_loss_aggregation_weights():
    lengths, of = np.array([1, 3, 0]), np.array([0, 1, 1, 1])
    assert token_weights("token-mean", lengths, of, 10).tolist() == [0.25] * 4
    np.testing.assert_allclose(token_weights("seq-mean-token-mean", lengths, of, 10), [1 / 2] + [1 / 6] * 3)
    np.testing.assert_allclose(token_weights("seq-mean-token-sum-norm", lengths, of, 10), [1 / 20] * 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: policy_loss("gspo", tensor(0.0), tensor(0.0), tensor(0.0), 0.2, 0.2),
        lambda: kl_divergence("k4", tensor(0.0), tensor(0.0)),
        lambda: importance_weights("none", tensor(0.0), tensor(0.0), torch.zeros(1), 2.0),
        lambda: token_weights("sum", np.array([1]), np.array([0]), 1),
    ],
)
def test_unknown_names_are_refused(call):
    with pytest.raises(ValueError, match=r"unknown|no importance weights"):
        call()
