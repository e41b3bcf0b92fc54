"""Chats and exported trajectories as ids and mask."""

import numpy as np
import pytest

from tasks.demonstrations import check_rows, render
from tasks.readers import BadData, PlacedRow
from tests.tiny import CHATML, tiny_tokenizer

CHAT = [
    {"role": "user", "content": "What is 12 times 7?"},
    {"role": "assistant", "content": "<calc>12*7</calc>"},
    {"role": "tool", "content": "84"},
    {"role": "assistant", "content": "<answer>84</answer>"},
]


def placed(**row):
    return PlacedRow(row, "demos.jsonl line 3")


def trained_texts(tokenizer, rendered):
    """The text of each run of mask 1."""
    ids, mask = np.array(rendered.token_ids), np.array(rendered.action_mask)
    cuts = np.flatnonzero(np.diff(mask)) + 1
    parts = zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
    return [tokenizer.decode(part) for part, of_mask in parts if of_mask[0]]


def test_only_assistant_turns_with_their_end_are_trained():
    tokenizer = tiny_tokenizer()
    rendered = render(placed(messages=CHAT), tokenizer, 500)
    assert trained_texts(tokenizer, rendered) == [
        "<calc>12*7</calc><|im_end|>",
        "<answer>84</answer><|im_end|>",
    ]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(rendered.token_ids) == whole.removesuffix(
        "\n"
    )  # nothing after the last turn's end


def test_a_template_that_rewrites_earlier_turns_is_refused_by_place():
    drops = CHATML.replace("message['content'] ", "(message['content'] if loop.last else '') ")
    with pytest.raises(BadData, match=r"demos\.jsonl line 3.*writes earlier turns anew"):
        render(placed(messages=CHAT), tiny_tokenizer(drops), 500)


def test_an_exported_trajectory_keeps_its_ids_and_mask():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("he") + tokenizer.encode("llo")  # not what "hello" would be encoded to
    row = placed(token_ids=ids, action_mask=[0] + [1] * (len(ids) - 1), text="hello")
    assert render(row, tokenizer, 50).token_ids == ids


def test_rows_that_cannot_be_used_name_their_place():
    tokenizer = tiny_tokenizer()
    with pytest.raises(BadData, match="another tokenizer"):
        render(placed(token_ids=[5, 6], action_mask=[0, 1], text="something else"), tokenizer, 50)
    with pytest.raises(BadData, match=r"more than task\.max_trajectory_tokens = 9"):
        render(placed(messages=CHAT), tokenizer, 9)
    with pytest.raises(BadData, match="nothing to train after a prompt"):
        render(placed(token_ids=[5, 6], action_mask=[0, 0]), tokenizer, 50)
    for row, reason in (
        (placed(messages=CHAT[:1]), "is no demonstration"),
        (placed(question="?"), "is no demonstration"),
        (placed(token_ids=[1, 2], action_mask=[1]), "equally long"),
    ):
        with pytest.raises(BadData, match=rf"demos\.jsonl line 3.*{reason}"):
            check_rows([row])
