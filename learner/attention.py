"""Exact attention for packed rows, registered with transformers as `slipstream_tree`.

Invariant: a token sees the row's root, the tokens before it in its own block's prefix and, in a
continuation, those of its own continuation; never another sequence. The layout arrives as the keyword
argument `attention_parts` through the model's forward, not through a global.

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
    """Queries [q_start, q_end) attend to keys [0, root) and [k_start, q_end) of the row."""

    q_start: int
    q_end: int
    k_start: int
    root: int
    mask: Tensor | None  # None: causal (queries are all the keys). dense: added to scores [H/K * q, k];
    dense: bool  # else bool [q, k], True where seen


def attention_parts(
    root: int, blocks: Sequence[Block], heads_per_key: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionPart, ...]:
    """The parts of a row in its order, with their masks made once for all layers.

    The prefix of a block without a root is a causal part of its own; a block that continues a root is one
    part, since no part of it is plainly causal.
    """

    def part(q_start: int, q_end: int, k_start: int, seen: Tensor, root: int = 0) -> AttentionPart:
        causal = root == 0 and q_start == k_start
        if device.type != "cpu" or seen.shape[1] > _DENSE_LIMIT:
            return AttentionPart(q_start, q_end, k_start, root, None if causal else seen, dense=False)
        added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return AttentionPart(q_start, q_end, k_start, root, added.repeat(heads_per_key, 1), dense=True)

    parts = [part(0, root, 0, _causal(root, device))] if root else []
    for block in blocks:
        start, middle, end = block.start, block.start + block.prefix, block.end
        seen = _block_sees(block, device)
        if root:
            parts.append(part(start, end, start, F.pad(seen, (root, 0), value=True), root))
            continue
        if block.prefix:
            parts.append(part(start, middle, start, seen[: block.prefix, : block.prefix]))
        if block.continuations:
            parts.append(part(middle, end, start, seen[block.prefix :]))
    return tuple(parts)


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()


def _block_sees(block: Block, device: torch.device) -> Tensor:
    """Bool [tokens, tokens] of a block: the prefix and one's own continuation, up to oneself."""
    lengths = torch.tensor((block.prefix, *block.continuations), device=device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    return ((owner[:, None] == owner[None, :]) | (owner[None, :] == 0)).tril_()


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_parts: Sequence[AttentionPart] = (),
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: query [1, H, T, D] to output [1, T, H, D].

    Without dropout: `learner.policy` turns it off, as the engine samples without.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and any(
        p.root + p.q_end - p.k_start > sliding_window for p in attention_parts
    ):
        raise ValueError(
            f"a packed block is longer than the model's sliding window of {sliding_window} tokens, which "
            "attention 'sdpa' here does not mask; lower task.max_trajectory_tokens or use flash_attention_2"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which attention 'sdpa' does not "
            "compute; set learner.attention = 'flash_attention_2' and learner.shared_prefix = false"
        )
    outputs = [_attend(query, key, value, part, scale) for part in attention_parts]
    return torch.cat(outputs, dim=1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scaling: float) -> Tensor:
    """Output [1, q, H, D] of one part."""
    q = query[:, :, part.q_start : part.q_end]
    k, v = (_keys(states, part) for states in (key, value))
    if part.dense and part.mask is not None:
        return _dense(q, k, v, part.mask, scaling)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def _keys(states: Tensor, part: AttentionPart) -> Tensor:
    own = states[:, :, part.k_start : part.q_end]
    return torch.cat([states[:, :, : part.root], own], dim=2) if part.root else own


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax attention by plain products. The H/K query heads of a key head are folded into its rows."""
    (_, heads, rows, size), keys = q.shape, k.shape[1]
    folded = q.reshape(keys, heads // keys * rows, size)
    scores = torch.baddbmm(mask.expand(keys, -1, -1), folded, k[0].transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1), v[0])
    return out.view(1, heads, rows, size).transpose(1, 2)


AttentionInterface.register(NAME, tree_attention)
