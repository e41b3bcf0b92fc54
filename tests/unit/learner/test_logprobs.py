import pytest
import torch

from learner import logprobs as module
from learner.logprobs import logprobs_and_entropy


def plain(hidden, weight, targets, temperature):
    log_p = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(rows, dtype=torch.float32, vocabulary=97):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, 8, 33, 75])  # below, at and above blocks and chunks
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_chunked_equals_plain_in_value_and_gradient(monkeypatch, rows, entropy_weight):
    monkeypatch.setattr(module, "_CHUNK", 32)
    hidden, weight, targets = inputs(rows)
    grade = torch.linspace(-1, 1, rows)

    def gradients(function):
        logprob, entropy = function(hidden, weight, targets, 0.7)
        loss = (logprob * grade).sum()
        if entropy_weight:
            loss = loss + entropy_weight * (entropy * grade.flip(0)).sum()
        return logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))

    for got, wanted in zip(gradients(logprobs_and_entropy), gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_bfloat16_logits_give_float32_results():
    hidden, weight, targets = inputs(20, torch.bfloat16)
    got = logprobs_and_entropy(hidden, weight, targets, 1.0)
    for value, wanted in zip(got, plain(hidden, weight, targets, 1.0), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


def test_only_the_entropy_may_be_used():
    hidden, weight, targets = inputs(5)
    _, entropy = logprobs_and_entropy(hidden, weight, targets, 1.0)
    (got,) = torch.autograd.grad(entropy.sum(), hidden)
    (wanted,) = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[1].sum(), hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_huge_logits_stay_finite():
    hidden, weight, targets = inputs(4)
    logprob, entropy = logprobs_and_entropy(hidden * 1e4, weight, targets, 1.0)
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
