"""Text and token ids of one tokenizer: the model's own words, template text, and text from outside.

Invariant: text from outside never becomes a control token, neither a special one (`<|im_end|>`) nor one
that is merely added to the vocabulary (Qwen's `<tool_call>`). CASES T7.
Used by the renderers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from toolcall.parsers.thinking import SECTIONS, TAGS, ends_in_opener, tags_in

HEADER_TOKENS = 32  # of a prompt's end, looked at for a thinking section that the template opens
ZERO_WIDTH_SPACE = "\u200b"


class Tokens:
    """markers: the call syntax's own tags; like thinking tags they stay in `text` where they are special."""

    def __init__(self, tokenizer: Any, markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        control = {text: id for text, id in tokenizer.get_added_vocab().items() if text.strip()}
        control |= dict(special)
        self._control = frozenset(control.values())
        longest_first = sorted(control, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        seen = {*markers, *TAGS}
        self._length = lru_cache(maxsize=None)(lambda text: len(self.literal(text)))  # of the few prefills
        self._unseen = {id for id in tokenizer.all_special_ids if tokenizer.decode([id]) not in seen}

    def literal(self, text: str) -> list[int]:
        """Encode template text: special tokens are special."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def plain(self, text: str) -> list[int]:
        """Encode text from outside: what looks like a control token becomes ordinary tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if self._control.isdisjoint(ids):
            return ids
        return self._tokenizer.encode(self.defused(text), add_special_tokens=False, split_special_tokens=True)

    def defused(self, text: str) -> str:
        """`text` with the spelling of every control token broken by an invisible character."""
        return self._spelled.sub(lambda match: match[0][0] + ZERO_WIDTH_SPACE + match[0][1:], text)

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model wrote, without special tokens but those of thinking and of its call syntax."""
        kept = [token for token in token_ids if token not in self._unseen]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def in_thinking(self, prompt_ids: Sequence[int], prefill: str) -> bool:
        """Does the turn after this prompt begin inside a thinking section, by template or prefill?"""
        if tags := tags_in(prefill):
            return tags[-1] in SECTIONS
        tail = self.decode(prompt_ids[-(HEADER_TOKENS + self._length(prefill)) :])
        return ends_in_opener(tail.removesuffix(prefill))
