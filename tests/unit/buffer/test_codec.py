import contextlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.codec import CodecError, Packed, decode, decode_trajectory, encode, encode_trajectory
from buffer.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchReply,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    Ok,
    PutTrajectory,
    RoleStatus,
    StatusReply,
    Turn,
    Welcome,
)
from tests.unit.buffer.support import same, trajectory

LEASE = Lease("0-1.1", "0-1", 1, 0, 4, (0, 2), 2**40, 3, 120.0)


@pytest.mark.parametrize(
    "message",
    [
        Ok(),
        Hello("actor", "actor-0"),
        Welcome("run", 0, None),
        Welcome("run", 3, "tcp://127.0.0.1:1"),
        LeaseGrant((LEASE, LEASE), "", 0.0),
        Heartbeat("actor", "a", ("0-1.1",), 2, "running", {"actor/tokens_sampled": 3.0}),
        BatchReply(None, 3),
        StatusReply(
            "run",
            1,
            2,
            (RoleStatus("actor", "a", "running", 1, 2, 0.5),),
            {"leased": 3},
            True,
            ((1, "actor", "a", 2.5, {"m": 1.0}),),
        ),
    ],
)
def test_a_message_comes_back_equal(message):
    assert decode(encode(message)) == message


def test_a_trajectory_comes_back_equal_with_its_dtypes_and_tuples():
    sent = trajectory(reward=0.5)
    got = decode(encode(PutTrajectory(sent))).trajectory
    assert same(sent, got)
    assert isinstance(got.turns, tuple) and isinstance(got.turns[0].calls, tuple)


def test_the_bytes_of_a_put_are_kept_as_they_came():
    sent = trajectory(prompt=50, sampled=400)
    got = decode(encode(PutTrajectory(sent)))
    assert got.payload == encode_trajectory(sent)
    plain = sum(array.nbytes for array in (sent.token_ids, sent.action_mask, sent.logprobs, sent.versions))
    assert len(got.payload) < plain  # the mask and the versions travel as runs


def test_a_failed_trajectory_without_any_token_comes_back():
    empty = replace(trajectory(reward=None, prompt=0, sampled=0), turns=())
    assert same(empty, decode_trajectory(encode_trajectory(empty)))


def test_a_batch_splices_stored_payloads_in():
    one, two = trajectory(index=0), trajectory(index=1)
    reply = decode(encode(BatchReply(Batch(1, 0, ((Packed(encode_trajectory(one)), two),)), 0)))  # type: ignore[arg-type]
    assert same(reply.batch.groups[0][0], one) and same(reply.batch.groups[0][1], two)


def test_numpy_scalars_are_sent_as_numbers():
    beat = decode(encode(Heartbeat("a", "b", metrics={"x": np.float32(0.5), "y": np.int64(2)})))  # type: ignore[dict-item]
    assert beat.metrics == {"x": 0.5, "y": 2.0}


def put_frame(**changes: object) -> bytes:
    """A PutTrajectory whose fields were changed behind the dataclass's back."""
    fields = {**msgpack.unpackb(encode_trajectory(trajectory())), **changes}
    inner = msgpack.packb(fields, default=lambda a: msgpack.ExtType(*a))
    return msgpack.packb([PROTOCOL_VERSION, "PutTrajectory", {"trajectory": msgpack.ExtType(16, inner)}])


def test_an_unchanged_frame_is_accepted():
    assert same(decode(put_frame()).trajectory, trajectory())


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"token_ids": msgpack.ExtType(3, bytes(32))}, "dtype"),
        ({"token_ids": [1, 2, 3]}, "dtype"),
        ({"token_ids": msgpack.ExtType(99, bytes(32))}, "dtype"),
        ({"token_ids": msgpack.ExtType(1, bytes(28))}, "length"),
        ({"token_ids": msgpack.ExtType(1, bytes(31))}, "length"),
        ({"action_mask": msgpack.ExtType(2, bytes([0, 0, 0, 2, 1, 1, 1, 0]))}, "field"),
        ({"action_mask": msgpack.ExtType(2, bytes([1, 0, 0, 1, 1, 1, 1, 0]))}, "field"),
        ({"token_ids": msgpack.ExtType(4, bytes(8))}, "dtype"),  # nothing says how long
        ({"logprobs": msgpack.ExtType(4, bytes([8, 0, 0, 0, 0, 0, 0, 0]))}, "dtype"),
        ({"versions": msgpack.ExtType(4, bytes([7, 0, 0, 0, 0, 0, 0, 0]))}, "length"),
        ({"action_mask": msgpack.ExtType(5, bytes([8, 0, 0, 0, 1]))}, "field"),
        ({"action_mask": msgpack.ExtType(5, bytes([8, 0, 0, 0]))}, "length"),
        ({"token_ids": [1], "versions": msgpack.ExtType(4, bytes(8))}, "dtype"),
        ({"prompt_len": 9}, "length"),
        ({"prompt_len": -1}, "length"),
        (
            {
                "turns": [
                    {
                        "start": 3,
                        "end": 2,
                        "observation_end": 8,
                        "finish_reason": "stop",
                        "calls": [],
                        "reward": 0,
                    }
                ]
            },
            "length",
        ),
        (
            {
                "turns": [
                    {
                        "start": 3,
                        "end": 7,
                        "observation_end": 9,
                        "finish_reason": "stop",
                        "calls": [],
                        "reward": 0,
                    }
                ]
            },
            "length",
        ),
        ({"trajectory_id": "0-1/7"}, "field"),
        ({"stop_reason": "tired"}, "field"),
        ({"reward": float("nan")}, "field"),
        ({"reward": "1"}, "field"),
        ({"index": True}, "field"),
        ({"index": 2**63}, "field"),
        ({"task": None}, "field"),
        ({"surprise": 1}, "field"),
    ],
)
def test_a_bad_field_is_refused_with_its_reason(changes, reason):
    with pytest.raises(CodecError) as refused:
        decode(put_frame(**changes))
    assert refused.value.reason == reason


def test_a_missing_field_is_refused():
    frame = msgpack.packb([PROTOCOL_VERSION, "Hello", {"role": "actor"}])
    with pytest.raises(CodecError, match="Hello takes the fields role, name, protocol"):
        decode(frame)


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (msgpack.packb(7), "msgpack"),
        (msgpack.packb([PROTOCOL_VERSION, "Ok", {}, 0]), "msgpack"),
        (b"\x91" * 5000 + b"\x00", "msgpack"),  # nested too deep
        (b"\xdd\xff\xff\xff\xff", "msgpack"),  # an array said to hold four billion items
        (msgpack.packb([PROTOCOL_VERSION - 1, "Ok", {}]), "version"),
        (msgpack.packb(["2", "Ok", {}]), "version"),
        (msgpack.packb([PROTOCOL_VERSION, "Pickle", {}]), "unknown_type"),
        (msgpack.packb([PROTOCOL_VERSION, "Trajectory", {}]), "unknown_type"),  # a part, not a message
        (msgpack.packb([PROTOCOL_VERSION, ["Ok"], {}]), "unknown_type"),
        (msgpack.packb([PROTOCOL_VERSION, "Ok", []]), "field"),
    ],
)
def test_a_bad_frame_is_refused_with_its_reason(data, reason):
    with pytest.raises(CodecError) as refused:
        decode(data)
    assert refused.value.reason == reason


def test_a_frame_over_the_limit_is_refused_unread():
    with pytest.raises(CodecError) as refused:
        decode(b"\xc1" * 101, max_bytes=100)
    assert refused.value.reason == "oversize"


@pytest.mark.parametrize("array", [np.zeros(3, "<i8"), np.zeros((2, 2), "<i4"), np.zeros(3, ">i4")])
def test_an_array_of_another_dtype_or_shape_is_not_sent(array):
    with pytest.raises(CodecError, match="use 1-D int32, uint8 or float32"):
        encode(PutTrajectory(replace(trajectory(), token_ids=array)))


def test_an_object_that_is_not_plain_data_is_not_sent():
    turn = Turn(3, 7, 8, "stop", ({"tool": object()},))
    with pytest.raises(CodecError, match="a object cannot be sent"):
        encode(PutTrajectory(replace(trajectory(), turns=(turn,))))


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data):
    with contextlib.suppress(CodecError):
        decode(data)


@given(st.data())
def test_a_damaged_message_never_raises_anything_else(data):
    frame = bytearray(encode(PutTrajectory(trajectory())))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode(bytes(frame))
