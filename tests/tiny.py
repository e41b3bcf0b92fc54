"""Tiny tokenizers and models, made on the spot: tests need no download and no packaged model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "hello hello world calc result answer tool call",
    "<calc>12*7</calc>\n<result>84</result>\n<answer>84</answer>",
    "What is 12 times 7?",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>',
]


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """A byte-level BPE of about 320 tokens with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    folder: Path, *, tie_embeddings: bool = True, seed: int = 0, more_tokens: Sequence[str] = ()
) -> Path:
    """A random two-layer llama in float32 with the tiny tokenizer, saved as a Hugging Face folder.

    `more_tokens` become one id each.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(more_tokens))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=tie_embeddings,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
