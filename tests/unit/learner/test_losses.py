import math

import numpy as np
import pytest
import torch

from learner.losses import (
    POLICY_LOSSES,
    Tokens,
    importance_weights,
    kl_divergence,
    policy_loss,
    token_weights,
    value_loss,
)
from tests.unit.learner.support import learner_config


def corrected(mode, proximal, behaviour, sequence_of, floor=0.5, cap=2.0):
    return importance_weights(mode, proximal, behaviour, sequence_of, floor, cap)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


def at(kind, ratio, advantage, *, old=0.0, **learner):
    """(loss, its gradient for the logprob, clipped) of one token with this ratio to `old`."""
    logprob = tensor(old + math.log(ratio)).requires_grad_()
    config = learner_config(policy_loss=kind, **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3} | learner)
    tokens = Tokens(logprob, tensor(old), tensor(advantage), torch.zeros(1, dtype=torch.int64))
    result = policy_loss(tokens, config)
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
    got = at("ppo", ratio, advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-6)
    assert got[2] is clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # r A = -10, but the dual clip bounds the loss at c |A|
        (2.0, -2.0, 4.0, 4.0, False),
        (5.0, 2.0, -2.6, 0.0, True),  # as without it
    ],
)
def test_the_dual_clip_bounds_the_loss_of_a_bad_token(ratio, advantage, loss, gradient, clipped):
    got = at("ppo", ratio, advantage, clip_ratio_c=3.0)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert got[2] is clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "clipped"),
    [(2.0, 1.0, -1.3, True), (0.5, 1.0, -0.8, True), (1.1, -2.0, 2.2, False)],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(ratio, advantage, gradient, clipped):
    got = at("cispo", ratio, advantage)
    assert got[1] == pytest.approx(gradient)
    assert got[2] is clipped


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_sapos_gate_has_the_plain_gradient_at_ratio_one_and_fades(advantage):
    tau = {"sapo_tau_pos": 2.0, "sapo_tau_neg": 4.0}
    assert at("sapo", 1.0, advantage, **tau)[1] == pytest.approx(-advantage)
    t = 2.0 if advantage > 0 else 4.0
    for ratio in (0.4, 2.5):  # the gradient of the gate: 4 p (1 - p) with p = sigmoid(tau (r - 1)), times r
        p = 1 / (1 + math.exp(-t * (ratio - 1)))
        loss, gradient, clipped = at("sapo", ratio, advantage, **tau)
        assert loss == pytest.approx(-p * 4 / t * advantage, rel=1e-5)
        assert gradient == pytest.approx(-4 * p * (1 - p) * ratio * advantage, rel=1e-4)
        assert clipped is False


@pytest.mark.parametrize(
    ("old", "ratio", "advantage", "cut"),
    [
        (0.5, 1.5, 1.0, True),  # probability .5 to .75: further than .15
        (0.5, 1.5, -1.0, False),  # it should fall and rose: the gradient stays
        (0.01, 9.0, 1.0, False),  # a rare token's ratio is large, its probability moved by .08 only
        (0.5, 0.5, -1.0, True),
        (0.5, 0.5, 1.0, False),
        (0.5, 1.2, 1.0, False),
        (0.5, 0.5, 0.0, False),  # no gradient to cut
    ],
)
def test_dppo_cuts_by_the_probability_moved_not_by_the_ratio(old, ratio, advantage, cut):
    loss, gradient, clipped = at(
        "dppo", ratio, advantage, old=math.log(old), clip_ratio_low=0.15, clip_ratio_high=0.15
    )
    assert clipped is cut
    wanted = 0.0 if cut else -ratio * advantage
    assert (loss, gradient) == pytest.approx((wanted, wanted), rel=1e-5)


def gspo_by_definition(logprobs, old, advantages, low, high):
    """The paper's objective for one sequence: its mean token loss."""
    s = torch.exp((logprobs - old).sum() / len(logprobs))
    a = advantages[0]
    return -torch.minimum(s * a, torch.clamp(s, 1 - low, 1 + high) * a)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("shift", [0.01, 0.5, -0.5])
def test_gspo_is_the_sequences_clipped_ratio(advantage, shift):
    logprobs = (tensor(-1.0, -2.0, -0.5, -1.5) + shift).requires_grad_()
    old = tensor(-1.1, -1.9, -0.5, -1.4)
    sequence = torch.tensor([4, 4, 4, 9])
    advantages = torch.full((4,), advantage)
    config = learner_config(policy_loss="gspo", clip_ratio_low=0.2, clip_ratio_high=0.3)
    result = policy_loss(Tokens(logprobs, old, advantages, sequence), config)
    total = result.tokens[:3].mean() + result.tokens[3]
    (got,) = torch.autograd.grad(total, logprobs)
    parts = [
        gspo_by_definition(logprobs[p], old[p], advantages[p], 0.2, 0.3) for p in (slice(3), slice(3, 4))
    ]
    wanted_total = parts[0] + parts[1]
    (wanted,) = torch.autograd.grad(wanted_total, logprobs)
    assert total.item() == pytest.approx(wanted_total.item(), rel=1e-5)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_gspo_takes_the_mean_of_the_log_ratios_as_they_are():
    """One token whose ratio left all bounds counts in full: only the mean is kept from overflowing."""
    old = torch.full((10,), -0.5)
    logprobs = torch.cat([old[:9], tensor(-40.0)])
    config = learner_config(policy_loss="gspo")
    one = torch.zeros(10, dtype=torch.int64)
    result = policy_loss(Tokens(logprobs, old, -torch.ones(10), one), config)
    assert result.ratio.tolist() == pytest.approx([math.exp(-3.95)] * 10)
    overflow = policy_loss(Tokens(old, old - 900, -torch.ones(10), one), config)
    assert torch.isfinite(overflow.tokens).all()


def test_sft_is_the_negative_log_likelihood_whatever_the_rewards():
    logprobs = tensor(-1.0, -3.0).requires_grad_()
    config = learner_config(policy_loss="sft")
    result = policy_loss(Tokens(logprobs, torch.zeros(2), tensor(9.0, -9.0), torch.zeros(2)), config)
    assert result.tokens.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("kind", sorted(set(POLICY_LOSSES) - {"sft"}))
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_at_ratio_one_every_loss_has_the_policy_gradient(kind, advantage):
    _, gradient, clipped = at(kind, 1.0, advantage, old=-0.7)
    assert gradient == pytest.approx(-advantage, rel=1e-5)
    assert clipped is False


def test_token_importance_weights_are_truncated():
    got = corrected("token", tensor(0.0, 0.0, 0.0), tensor(-5.0, 0.0, 1.0), torch.arange(3), cap=2.0)
    assert got.tolist() == pytest.approx([2.0, 1.0, math.exp(-1)])


def test_sequence_importance_weights_multiply_over_the_sequence():
    proximal = tensor(0.1, 0.2, -1.0, 0.3)
    got = corrected("sequence", proximal, torch.zeros(4), torch.tensor([7, 7, 2, 7]), cap=1.7)
    assert got.tolist() == pytest.approx([1.7, 1.7, math.exp(-1.0), 1.7])  # exp(0.6) = 1.82 is over the cap


def test_importance_weights_carry_no_gradient_and_stay_finite():
    proximal = tensor(0.0, -1000.0).requires_grad_()
    got = corrected("token", proximal, tensor(-1000.0, 0.0), torch.arange(2), cap=2.0)
    assert not got.requires_grad
    assert got.tolist() == [2.0, 0.0]


def test_icepop_drops_tokens_outside_its_bounds_and_weighs_the_others():
    ratios = [0.4, 0.6, 1.0, 4.0, 6.0]
    got = corrected("token-mask", tensor(*map(math.log, ratios)), torch.zeros(5), torch.arange(5), 0.5, 5.0)
    assert got.tolist() == pytest.approx([0.0, 0.6, 1.0, 4.0, 0.0])


def test_the_sequence_mask_judges_by_the_geometric_mean():
    proximal = tensor(math.log(9.0), math.log(1 / 9), math.log(8.0), math.log(2.0))
    got = corrected("sequence-mask", proximal, torch.zeros(4), torch.tensor([1, 1, 2, 2]), 0.5, 3.0)
    assert got.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])  # means 1 and 4


@pytest.mark.parametrize("kind", sorted(set(POLICY_LOSSES) - {"sft"}))
@pytest.mark.parametrize("mode", ["token", "sequence", "token-mask", "sequence-mask"])
def test_t9_an_unchanged_policy_has_ratio_and_weight_one(kind, mode):
    logprobs = tensor(-0.5, -3.0)
    sequence = torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(logprobs, logprobs, tensor(1.0, -1.0), sequence)
    assert policy_loss(tokens, learner_config(policy_loss=kind)).ratio.tolist() == [1.0, 1.0]
    assert corrected(mode, logprobs, logprobs, sequence).tolist() == [1.0, 1.0]


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
    lengths, group = np.array([1, 3, 0, 4]), np.array([0, 0, 1, 2])
    of = np.array([0, 1, 1, 1, 3, 3, 3, 3])

    def weights(mode):
        return token_weights(mode, lengths, of, 10, group)

    np.testing.assert_allclose(weights("token-mean"), [1 / 8] * 8)
    np.testing.assert_allclose(weights("seq-mean-token-mean"), [1 / 3] + [1 / 9] * 3 + [1 / 12] * 4)
    np.testing.assert_allclose(weights("seq-mean-token-sum"), [1 / 3] * 8)
    np.testing.assert_allclose(weights("seq-mean-token-sum-norm"), [1 / 30] * 8)
    np.testing.assert_allclose(weights("prompt-mean"), [1 / 8] * 8)  # 2 prompts with 4 tokens each
    lengths[1] = 1
    np.testing.assert_allclose(weights("prompt-mean")[4:], [1 / 8] * 4)
    np.testing.assert_allclose(weights("prompt-mean")[:1], [1 / 4])


def test_the_value_loss_takes_the_worse_of_plain_and_clipped():
    values = tensor(1.0, 1.0, 0.1).requires_grad_()
    got = value_loss(values, torch.zeros(3), tensor(2.0, 0.0, 2.0), clip=0.2)
    # errors: plain 1, 1, 3.61; near the old values .2, .2, .1: 3.24, .04, 3.61
    assert got.tolist() == pytest.approx([1.62, 0.5, 1.805])
    (gradient,) = torch.autograd.grad(got.sum(), values)
    assert gradient.tolist() == pytest.approx([0.0, 1.0, -1.9])
    assert value_loss(values, torch.zeros(3), tensor(2.0, 0.0, 2.0), clip=0.0)[0].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kl_divergence("k4", tensor(0.0), tensor(0.0)),
        lambda: corrected("none", tensor(0.0), tensor(0.0), torch.zeros(1)),
        lambda: token_weights("sum", np.array([1]), np.array([0]), 1, np.array([0])),
    ],
)
def test_unknown_names_are_refused(call):
    with pytest.raises(ValueError, match=r"unknown|no importance weights"):
        call()
