"""Log-probabilities of given tokens without a [N, vocabulary] float32 matrix kept for the backward pass.

Invariant: at most `_CHUNK` rows of logits exist at a time, in forward and backward; only hidden states,
targets and two floats per row are saved, and the backward pass computes the logits again. The temperature
of the policy divides the logits, as the engine does when it samples. Called by `learner.policy`.

On CPU the element-wise work is done on a few rows at a time, which stay in the core's cache: twice as
fast as on a whole chunk, and as fast as a compiled kernel, without a compiler.
Shapes: N rows, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 512  # rows of one matrix product; enough to keep it efficient
_CACHED_ROWS = 8  # rows of float32 logits that fit a CPU core's cache for vocabularies of 50k and more


def logprobs_and_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, float32 [N], both differentiable."""
    logprobs, entropy = _ChunkedLogprobs.apply(hidden_NC, weight_VC, targets_N, 1.0 / temperature)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy


class LogprobHead(nn.Module):
    """Takes the place of a model's LM head and shares its weight.

    A module of its own, so that ZeRO-3 gathers the weight by the same hooks as any layer's.
    """

    def __init__(self, head: nn.Linear, temperature: float, *, float32: bool = False) -> None:
        super().__init__()
        self.weight = head.weight
        self.temperature = temperature
        self.float32 = float32

    def forward(self, hidden_NC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        weight_VC = self.weight
        if self.float32:
            hidden_NC, weight_VC = hidden_NC.float(), weight_VC.float()
        return logprobs_and_entropy(hidden_NC, weight_VC, targets_N, self.temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Any:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows, z, _ in _scaled_logits(hidden, weight, scale):
            peak = z.amax(-1, keepdim=True)
            e = (z - peak).exp_()
            total = e.sum(-1)
            normaliser[rows] = total.log() + peak[:, 0]
            logprobs[rows] = z.gather(-1, targets[rows, None])[:, 0] - normaliser[rows]
            entropy[rows] = normaliser[rows] - e.mul_(z).sum(-1) / total  # log Z - E[z]
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """d logprob / dz = onehot - p and d entropy / dz = -p (z - E[z]), z the scaled logits."""
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        d_logprobs, d_entropy = gradients
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(normaliser)
        d_hidden = torch.empty_like(hidden)
        d_weight = _WeightGradient(weight, chunks=-(-hidden.shape[0] // _CHUNK))
        for rows, z, chunk in _scaled_logits(hidden, weight, ctx.scale):
            if d_entropy is None:
                dz = z.sub_(normaliser[rows, None]).exp_().mul_(-d_logprobs[rows, None])
            else:
                away_from_mean = z - (normaliser - entropy)[rows, None]
                p = z.sub_(normaliser[rows, None]).exp_()
                dz = p.mul_(-(d_logprobs[rows, None] + d_entropy[rows, None] * away_from_mean))
            dz.scatter_add_(1, targets[rows, None], d_logprobs[rows, None])
            chunk.logits[rows.start - chunk.start : rows.stop - chunk.start] = dz.mul_(ctx.scale)
            if rows.stop == chunk.start + len(chunk.logits):  # the logits now hold their gradient
                part = slice(chunk.start, rows.stop)
                torch.mm(chunk.logits, weight, out=d_hidden[part])
                d_weight.add(chunk.logits, hidden[part])
        return d_hidden, d_weight.total(), None, None


class _Chunk:
    """Logits [rows, V] in the model's dtype, of the rows from `start`."""

    def __init__(self, start: int, logits: Tensor) -> None:
        self.start, self.logits = start, logits


def _scaled_logits(hidden: Tensor, weight: Tensor, scale: float) -> Iterator[tuple[slice, Tensor, _Chunk]]:
    """(rows, their scaled logits in float32, the chunk they lie in), block after block.

    The float32 block is valid until the next one; both buffers are used again and again, since fresh pages
    cost more than the arithmetic.
    """
    count = hidden.shape[0]
    step = _CACHED_ROWS if hidden.device.type == "cpu" else _CHUNK
    buffer = hidden.new_empty(min(_CHUNK, count), weight.shape[0])
    block = torch.empty(min(step, count), weight.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        chunk = _Chunk(start, buffer[: stop - start])
        torch.mm(hidden[start:stop], weight.t(), out=chunk.logits)
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            z = block[: rows.stop - rows.start]
            z.copy_(chunk.logits[rows.start - start : rows.stop - start])
            yield rows, z.mul_(scale), chunk


class _WeightGradient:
    """Sums the chunks' parts in float32, unless there is only one."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        self._dtype = weight.dtype
        self._part = torch.zeros_like(weight)
        self._sum = torch.zeros_like(weight, dtype=torch.float32) if chunks > 1 else None

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        torch.mm(d_logits.t(), hidden, out=self._part)
        if self._sum is not None:
            self._sum.add_(self._part)

    def total(self) -> Tensor:
        return self._part if self._sum is None else self._sum.to(self._dtype)
