"""Log-probabilities of given tokens without a [N, vocabulary] float32 matrix kept for the backward pass.

Invariant: at most one chunk of `_CHUNK` rows of logits exists at a time, in forward and backward; only
hidden states, targets and two floats per row are saved. The temperature of the policy divides the logits,
as the engine does when it samples. Called by `learner.policy`. Shapes: N rows, V vocabulary, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 512  # rows; enough to keep the matrix products efficient


def logprobs_and_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, float32 [N], both differentiable."""
    return _ChunkedLogprobs.apply(hidden_NC, weight_VC, targets_N, 1.0 / temperature)  # pyright: ignore[reportReturnType]


class LogprobHead(nn.Module):
    """Takes the place of a model's LM head and shares its weight.

    A module of its own, so that ZeRO-3 gathers the weight by the same hooks as any layer's.
    """

    def __init__(self, head: nn.Linear, temperature: float) -> None:
        super().__init__()
        self.weight = head.weight
        self.temperature = temperature

    def forward(self, hidden_NC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(hidden_NC, self.weight, targets_N, self.temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    """Backward recomputes each chunk's logits: one more matrix product, no [N, V] kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Any:
        rows = hidden.shape[0]
        logprobs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for i in range(0, rows, _CHUNK):
            part = slice(i, i + _CHUNK)
            logits = torch.mm(hidden[part], weight.t())
            logprobs[part], normaliser[part], entropy[part] = _forward_chunk(logits, targets[part], scale)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.scale = scale
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        d_logprobs, d_entropy = gradients
        d_hidden = torch.empty_like(hidden)
        one_chunk = hidden.shape[0] <= _CHUNK
        d_weight = None if one_chunk else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for i in range(0, hidden.shape[0], _CHUNK):
            part = slice(i, i + _CHUNK)
            logits = torch.mm(hidden[part], weight.t())
            d_logits = _backward_chunk(
                logits,
                targets[part],
                normaliser[part],
                entropy[part],
                d_logprobs[part],
                d_entropy[part],
                ctx.scale,
            )
            d_hidden[part] = torch.mm(d_logits, weight)
            product = torch.mm(d_logits.t(), hidden[part])
            d_weight = product if d_weight is None else d_weight.add_(product)
        return d_hidden, d_weight.to(weight.dtype) if d_weight is not None else None, None, None


def _forward_chunk(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, log-sum-exp, entropy) of each row. entropy = lse - E[z], with z the scaled logits."""
    z = logits.float() * scale
    peak = z.amax(-1, keepdim=True)
    e = (z - peak).exp()
    total = e.sum(-1)
    normaliser = total.log() + peak[:, 0]
    entropy = normaliser - (e * z).sum(-1) / total
    return z.gather(-1, targets[:, None])[:, 0] - normaliser, normaliser, entropy


def _backward_chunk(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor,
    scale: float,
) -> Tensor:
    """Gradient of the logits: d logprob / dz = onehot - p;  d entropy / dz = -p (z - E[z])."""
    z = logits.float() * scale
    p = (z - normaliser[:, None]).exp()
    mean = (normaliser - entropy)[:, None]
    dz = -p * (d_logprobs[:, None] + d_entropy[:, None] * (z - mean))
    dz.scatter_add_(1, targets[:, None], d_logprobs[:, None])
    return (dz * scale).to(logits.dtype)
