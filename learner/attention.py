"""Exact attention for packed rows, registered with transformers as `slipstream_tree`.

Invariant: a token sees the tokens before it in its own block's prefix and, in a continuation, those of
its own continuation; never another sequence. The layout arrives as the keyword argument
`attention_parts` through the model's forward, not through a global.

Two ways to compute a part, both exact: on CPU, up to `_DENSE_LIMIT` keys, one batched matrix product over
the folded query heads (half the time of PyTorch's CPU flash kernel for few hundred tokens, whose
backward is slow); else `scaled_dot_product_attention`, which keeps no matrix of scores.

Called by `learner.policy`. Shapes: H query heads, K key heads, T row length, D head size; q and k are the
queries and keys of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from learner.batch import Block

NAME = "slipstream_tree"
_DENSE_LIMIT = 1024  # keys; beyond it the matrix of scores costs more memory than it saves time


@dataclass(frozen=True)
class AttentionPart:
    """Queries [q_start, q_end) attend to keys [k_start, q_end) of the row."""

    q_start: int
    q_end: int
    k_start: int
    mask: Tensor | None  # None: causal (queries are all the keys). dense: added to scores [H/K * q, k];
    dense: bool  # else bool [q, k], True where seen


def attention_parts(
    blocks: Sequence[Block], heads_per_key: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionPart, ...]:
    """The parts of a row, with their masks made once for all layers."""
    parts = []
    for block in blocks:
        middle = block.start + block.prefix
        if block.prefix:
            seen = torch.ones(block.prefix, block.prefix, dtype=torch.bool, device=device).tril()
            parts.append(_part(block.start, middle, block.start, seen, True, heads_per_key, dtype))
        if block.continuations:
            seen = _continuations_see(block, device)
            parts.append(_part(middle, block.end, block.start, seen, False, heads_per_key, dtype))
    return tuple(parts)


def _part(
    q_start: int, q_end: int, k_start: int, seen: Tensor, causal: bool, heads_per_key: int, dtype: torch.dtype
) -> AttentionPart:
    if seen.device.type != "cpu" or seen.shape[1] > _DENSE_LIMIT:
        return AttentionPart(q_start, q_end, k_start, None if causal else seen, dense=False)
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return AttentionPart(q_start, q_end, k_start, added.repeat(heads_per_key, 1), dense=True)


def _continuations_see(block: Block, device: torch.device) -> Tensor:
    """Bool [q, prefix + q]: the whole prefix, and one's own continuation up to oneself."""
    lengths = torch.tensor(block.continuations, device=device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    own = (owner[:, None] == owner[None, :]).tril_()
    return F.pad(own, (block.prefix, 0), value=True)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_parts: Sequence[AttentionPart] = (),
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: query [1, H, T, D] to output [1, T, H, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and any(p.q_end - p.k_start > sliding_window for p in attention_parts):
        raise ValueError(
            f"a packed block is longer than the model's sliding window of {sliding_window} tokens, which "
            "attention 'sdpa' here does not mask; lower task.max_trajectory_tokens or use flash_attention_2"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which attention 'sdpa' does not "
            "compute; set learner.attention = 'flash_attention_2' and learner.shared_prefix = false"
        )
    outputs = [_attend(query, key, value, part, scale, dropout) for part in attention_parts]
    return torch.cat(outputs, dim=1), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scaling: float, dropout: float
) -> Tensor:
    """Output [1, q, H, D] of one part."""
    q = query[:, :, part.q_start : part.q_end]
    k, v = key[:, :, part.k_start : part.q_end], value[:, :, part.k_start : part.q_end]
    if part.dense and part.mask is not None and dropout == 0.0:
        return _dense(q, k, v, part.mask, scaling)
    mask = part.mask
    if part.dense and mask is not None:
        mask = mask[: q.shape[2]]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=True
    )
    return out.transpose(1, 2)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax attention by plain products. The H/K query heads of a key head are folded into its rows."""
    (_, heads, rows, size), keys = q.shape, k.shape[1]
    folded = q.reshape(keys, heads // keys * rows, size)
    scores = torch.baddbmm(mask.expand(keys, -1, -1), folded, k[0].transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1), v[0])
    return out.view(1, heads, rows, size).transpose(1, 2)


AttentionInterface.register(NAME, tree_attention)
