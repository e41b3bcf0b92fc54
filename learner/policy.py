"""The model as the learner runs it: packed rows in, logprobs and entropies of the targets out.

Invariant: hidden states are gathered before the LM head, so only tokens that count in the loss ever get
logits. Called by `learner.trainer` (for the policy, and for the reference model when there is one).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner import attention
from learner.batch import MicroBatch
from learner.logprobs import LogprobHead

# Scalings between hidden states and logits which `LogprobHead` does not know.
_UNKNOWN_SCALINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")

# Layers that see other tokens only by the attention which keeps the sequences of a packed row apart.
_KEEP_APART = {"full_attention", "sliding_attention", "moe"}


@dataclass(frozen=True)
class Row:
    """A micro-batch on the device, with what its attention needs."""

    token_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    attention: dict[str, Any]  # keyword arguments for the model's attention function
    predict_from: Tensor  # int64 [N]
    targets: Tensor  # int64 [N]
    behaviour: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    weights: Tensor  # float32 [N]
    sequence_of: Tensor  # int64 [N]
    token_index: Tensor  # int64 [N]


class Policy(nn.Module):
    """A causal LM whose head computes logprobs of given targets, and a critic's head if there is one.

    `hf` holds the weights that engines get; the critic is not among them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        *,
        critic: bool = False,
        fp32_lm_head: bool = False,
    ) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"{type(model).__name__} has no plain linear LM head without bias; Slipstream cannot train it"
            )
        for name in _UNKNOWN_SCALINGS:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"{type(model).__name__} scales its logits ({name}); Slipstream cannot train it yet"
                )
        others = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _KEEP_APART)
        if others or getattr(model, "_is_stateful", False):
            raise ValueError(
                f"{type(model).__name__} mixes tokens outside plain attention "
                f"({', '.join(others) or 'it keeps a state'}), so in a packed row one trajectory would see "
                "another; Slipstream cannot train it yet"
            )
        model.set_output_embeddings(LogprobHead(head, temperature, float32=fp32_lm_head))
        self.hf = model
        self.critic: nn.Linear | None = None
        if critic:
            self.critic = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    def forward(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """(logprobs, entropies, values) of the row's targets, float32 [N]; values are 0 without a critic.

        A target's value is the critic's of the state before it was sampled.
        """
        hidden = self.hf.base_model(
            input_ids=row.token_ids, position_ids=row.position_ids, use_cache=False, **row.attention
        ).last_hidden_state
        head = self.hf.get_output_embeddings()
        assert isinstance(head, LogprobHead)
        states = hidden[0].index_select(0, row.predict_from)
        logprobs, entropy = head(states, row.targets)
        values = torch.zeros_like(logprobs) if self.critic is None else self.critic(states)[:, 0].float()
        return logprobs, entropy, values

    def parameter_groups(self, critic_lr: float) -> list[dict[str, Any]]:
        """For the optimizer: what is trained of the model, then the critic's head with its own rate."""
        groups: list[dict[str, Any]] = [{"params": [p for p in self.hf.parameters() if p.requires_grad]}]
        if self.critic is not None:
            groups.append({"params": list(self.critic.parameters()), "lr": critic_lr})
        return groups

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def row(self, micro: MicroBatch, device: torch.device) -> Row:
        """Move a micro-batch to the device and lay its attention out."""

        def move(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return Row(
            token_ids=move(micro.token_ids),
            position_ids=move(micro.position_ids),
            attention=self._attention_arguments(micro, device),
            predict_from=move(micro.predict_from),
            targets=move(micro.targets),
            behaviour=move(micro.behaviour),
            advantages=move(micro.advantages),
            weights=move(micro.weights),
            sequence_of=move(micro.sequence_of),
            token_index=move(micro.token_index),
        )

    def _attention_arguments(self, micro: MicroBatch, device: torch.device) -> dict[str, Any]:
        config = self.hf.config.get_text_config()
        if config._attn_implementation == attention.NAME:
            heads_per_key = config.num_attention_heads // config.num_key_value_heads
            parts = attention.attention_parts(micro.root, micro.blocks, heads_per_key, self.dtype, device)
            return {"attention_parts": parts}
        ends = torch.tensor([0] + [block.end for block in micro.blocks], dtype=torch.int32, device=device)
        longest = max(block.end - block.start for block in micro.blocks)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def load_policy(
    folder: Path,
    *,
    dtype: Literal["bfloat16", "float32"],
    attention_name: str,
    temperature: float,
    gradient_checkpointing: bool = False,
    critic: bool = False,
    fp32_lm_head: bool = False,
    compile_blocks: bool = False,
) -> Policy:
    """Load a Hugging Face folder in training form. Raises ValueError for a model it cannot train."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention_name
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _turn_dropout_off(model)
    if compile_blocks:
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.compile(dynamic=True)
    return Policy(model, temperature, critic=critic, fp32_lm_head=fp32_lm_head).train()


def _turn_dropout_off(model: PreTrainedModel) -> None:
    """The engine samples without dropout; with it, an unchanged policy would not have ratio 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.__dict__["attention_dropout"] = 0.0


def choose_attention(setting: str, shared_prefix: bool, device: str) -> str:
    """The attention implementation's name for `learner.attention` on this device."""
    if setting == "flash_attention_2":
        return setting
    if setting == "auto" and device == "cuda" and not shared_prefix:
        from transformers.utils.import_utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            return "flash_attention_2"
    return attention.NAME
