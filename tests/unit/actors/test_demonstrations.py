"""The actor without an engine, against a fake buffer."""

import asyncio

import numpy as np

from actors.demonstrations import put_demonstrations
from buffer.codec import decode_trajectory, encode_trajectory
from buffer.messages import Lease
from tasks.readers import PlacedRow
from tests.fakes import FakeBuffer
from tests.tiny import tiny_tokenizer


def lease(number, prompt_index):
    return Lease(f"l{number}", f"0-{prompt_index}", prompt_index, 0, 1, (0,), 0, version=4, deadline_s=60)


def test_every_lease_is_answered_with_its_row_as_a_trajectory():
    tokenizer = tiny_tokenizer()
    rows = [
        PlacedRow({"token_ids": [5, 6, 7, 8, 9, 10], "action_mask": [0, 0, 1, 1, 0, 1]}, "line 1"),
        PlacedRow(
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
            "line 2",
        ),
    ]
    buffer = FakeBuffer([lease(1, 1), lease(2, 0)])
    asyncio.run(put_demonstrations(rows, tokenizer, 100, buffer, "actor-0"))
    chat, exact = buffer.put
    assert (chat.trajectory_id, exact.trajectory_id) == ("0-1/0", "0-0/0")
    assert exact.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert exact.versions.tolist() == [-1, -1, 4, 4, -1, 4]
    assert exact.prompt_len == 2 and exact.reward == 0.0
    assert [(t.start, t.end, t.observation_end) for t in exact.turns] == [(2, 4, 5), (5, 6, 6)]
    assert tokenizer.decode(chat.token_ids[chat.action_mask.astype(bool)]) == "hello<|im_end|>"
    assert np.array_equal(decode_trajectory(encode_trajectory(exact)).token_ids, exact.token_ids)  # sendable
    assert buffer.beats[-1].state == "finished"
