import msgpack
import pytest

from weightsync.wire import Begin, Commit, GroupSpec, Join, Loaded, Probe, Welcome, WireError, decode, encode

GROUP = GroupSpec("gloo", "127.0.0.1", 1234, "run/1", 1, 3, 20.0)


@pytest.mark.parametrize(
    "message",
    [
        Join("actor-0", ("cpu", "cpu"), "run/ab", 3),
        Welcome("run/ab", (("w", "bfloat16", (2, 3)), ("b", "float32", ())), 1 << 20),
        Begin(7, GROUP),
        Commit(7, 4, 0xFFFFFFFF),
        Commit(7, 4, 1, Probe((5, 6), (-0.5,))),
        Loaded(7, 4, 0.5),
    ],
)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\xc1", "not MessagePack"),
        (msgpack.packb(["Exec", "rm"]), "not a weightsync message"),
        (msgpack.packb({"Join": 1}), "not a weightsync message"),
        (msgpack.packb([["unhashable"]]), "not a weightsync message"),
        (msgpack.packb(["Commit", 1, 2]), "Commit has 4 fields"),
        (msgpack.packb(["Commit", 1, 2, "3", [[], []]]), "Commit.checksum must be int, got str"),
        (msgpack.packb(["Commit", True, 2, 3, [[], []]]), "Commit.transfer must be int, got bool"),
        (msgpack.packb(["Join", "a", "cpu", "", 0, 1]), "Join.devices must be a list, got str"),
        (msgpack.packb(["Begin", 1, ["gloo", "h", 1]]), "Begin.group has 8 fields"),
        (msgpack.packb(["Welcome", "s", [["w", "float32"]], 1]), "Welcome.tensors must have 3 items, got 2"),
    ],
)
def test_a_strange_message_is_refused_with_what_is_wrong(body, says):
    with pytest.raises(WireError, match=says):
        decode(body)
