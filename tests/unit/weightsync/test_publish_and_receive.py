"""Publisher and receivers over real sockets and every backend of a CPU, with a fake engine."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
import zmq

from configs.run_folder import CurveKeys
from metrics import names
from tests.unit.weightsync.support import (
    WAIT_S,
    HangingEngine,
    StagedEngine,
    new_keys,
    publisher,
    running,
    weights,
)
from weightsync.curve import secure_client
from weightsync.receiver import EngineBroken, Receiver, SyncRefused
from weightsync.wire import Begin, Commit, Join, decode, encode


@pytest.fixture(params=["gloo", "shm", "disk"])
def channel(request, tmp_path) -> dict[str, Any]:
    """Arguments of `publisher`: one backend after the other."""
    return {"backend": request.param, "run_dir": tmp_path}


def run(scenario: Coroutine) -> None:
    async def within_the_limit():
        async with asyncio.timeout(2 * WAIT_S):
            await scenario

    asyncio.run(within_the_limit())


def test_every_receiver_gets_every_version(channel):
    async def scenario():
        keys = new_keys()
        engines = [StagedEngine(), StagedEngine()]
        with publisher(keys, **channel) as learner:
            receivers = [
                Receiver(engine, keys, f"actor-{i}", WAIT_S, "recompute", endpoint=learner.endpoint)
                for i, engine in enumerate(engines)
            ]
            async with running(receivers[0]), running(receivers[1]):
                for version in (1, 2, 3):
                    learner.publish(version, weights(version / 4))
                    for receiver in receivers:
                        await receiver.wait_for_version(version, WAIT_S)
                    assert [engine.values() for engine in engines] == [{version / 4}] * 2
                await asyncio.to_thread(learner.wait_idle, WAIT_S)
            published = learner.metrics()
        assert published[names.SYNC_VERSION] == 3
        assert published[names.SYNC_PAUSE_S] == 0.25
        assert published[names.SYNC_BYTES] > 0 and published[names.SYNC_TRANSFER_S] > 0
        received = receivers[0].take_metrics()
        assert received[names.ACTOR_PAUSED_S] == pytest.approx(0.75)
        assert (received[names.SYNC_VERSION], received[names.SYNC_PAUSE_S]) == (3, 0.25)
        assert received[names.SYNC_SWAPPED_AT] == pytest.approx(time.time(), abs=WAIT_S)
        assert names.ACTOR_PAUSED_S not in receivers[0].take_metrics()

    run(scenario())


@pytest.mark.parametrize(("kv_cache", "clears"), [("keep", False), ("recompute", True)])
def test_kv_cache_decides_whether_the_engine_forgets(kv_cache, clears):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        with publisher(keys) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, kv_cache, endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)
        assert engine.swaps == [(1, clears)]
        assert (receiver.cache_salt is None) == clears

    run(scenario())


def test_no_two_weights_share_a_cache_salt_even_when_a_restarted_learner_counts_again():
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        receiver = Receiver(engine, keys, "actor-0", WAIT_S, "keep")
        salts = [receiver.cache_salt]
        async with running(receiver):
            for value in (1, 2):
                with publisher(keys) as learner:
                    receiver.set_endpoint(learner.endpoint)
                    learner.publish(1, weights(value))
                    await asyncio.to_thread(wait_until_joined, learner)
                    salts.append(receiver.cache_salt)
        assert len(set(salts)) == 3

    run(scenario())


def test_a_late_receiver_catches_up(channel):
    async def scenario():
        keys = new_keys()
        engines = [StagedEngine(), StagedEngine()]
        with publisher(keys, **channel) as learner:
            first, late = (
                Receiver(engine, keys, f"actor-{i}", WAIT_S, "recompute", endpoint=learner.endpoint)
                for i, engine in enumerate(engines)
            )
            async with running(first):
                learner.publish(4, weights(4))
                await first.wait_for_version(4, WAIT_S)
                async with running(late):
                    await late.wait_for_version(4, WAIT_S)
                    assert engines[1].values() == {4.0}
        assert engines[0].swaps == [(4, True)]

    run(scenario())


def test_m4_a_hanging_engine_is_left_behind_and_the_other_gets_the_version():
    timeout_s = 2.0

    async def scenario():
        keys = new_keys()
        engine, hanging = StagedEngine(), HangingEngine()
        with publisher(keys, timeout_s) as learner:
            receiver = Receiver(engine, keys, "actor-0", timeout_s, "recompute", endpoint=learner.endpoint)
            stuck = Receiver(hanging, keys, "actor-1", timeout_s, "recompute", endpoint=learner.endpoint)
            async with running(receiver), AsyncExitStack() as stack:
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)
                hanging.hangs = False
                task = await stack.enter_async_context(running(stuck))
                await stuck.wait_for_version(1, WAIT_S)
                await asyncio.to_thread(learner.wait_idle, WAIT_S)
                hanging.hangs = True
                learner.publish(2, weights(2))  # both are in this broadcast
                await receiver.wait_for_version(2, WAIT_S)
                assert stuck.version == 1 and not task.done()
                await asyncio.to_thread(learner.wait_idle, WAIT_S)  # nobody waits for the one that hangs
        assert engine.values() == {2.0} and engine.aborts >= 1

    run(scenario())


def test_damaged_bytes_are_never_loaded_and_are_sent_again(channel):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        engine.damages = 1
        with publisher(keys, **channel) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)
        assert engine.aborts == 1 and engine.swaps == [(1, True)]

    run(scenario())


def test_an_engine_that_differs_from_the_learner_gets_the_weights_again():
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        engine.misloads = 1
        with publisher(keys) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "keep", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(-2), ([5, 6, 7], [-2.0, -2.25]))
                await receiver.wait_for_version(1, WAIT_S)
                await asyncio.to_thread(learner.wait_idle, WAIT_S)
                assert receiver.take_metrics()[names.SYNC_PROBE] == pytest.approx(0.125)
                learner.publish(2, weights(-3))  # no probe with this one
                await receiver.wait_for_version(2, WAIT_S)
        assert [version for version, _ in engine.swaps] == [1, 1, 2]

    run(scenario())


@pytest.mark.parametrize("logprob", [-9.0, float("nan")])
def test_m5_an_engine_that_differs_again_ends_the_receiver(logprob):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        with publisher(keys) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "keep", endpoint=learner.endpoint)
            task = asyncio.create_task(receiver.run())
            learner.publish(1, weights(-2), ([5, 6], [logprob]))
            with pytest.raises(EngineBroken, match="after the weights were loaded twice"):
                await asyncio.wait_for(task, WAIT_S)

    run(scenario())


def test_m5_an_engine_that_broke_while_loading_ends_the_receiver(channel):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        engine.breaks_in_swap = True
        with publisher(keys, **channel) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            task = asyncio.create_task(receiver.run())
            learner.publish(1, weights(1))
            with pytest.raises(EngineBroken, match="half loaded"):
                await asyncio.wait_for(task, WAIT_S)
        assert receiver.version == 0

    run(scenario())


def test_a_restarted_learner_is_followed_even_to_an_older_version(channel):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        with publisher(keys, **channel) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(9, weights(9))
                await receiver.wait_for_version(9, WAIT_S)
                learner.close()
                with publisher(keys, **channel) as restarted:
                    restarted.publish(8, weights(0.5))
                    receiver.set_endpoint(restarted.endpoint)
                    await asyncio.to_thread(wait_until_joined, restarted)
                    assert receiver.version == 8 and engine.values() == {0.5}

    run(scenario())


def test_what_a_killed_learner_left_on_disk_is_removed_by_the_next(tmp_path):
    left = tmp_path / "weights" / "run-ab-0-1.safetensors.part"
    left.parent.mkdir()
    left.write_bytes(b"half a file")
    with publisher(new_keys(), backend="disk", run_dir=tmp_path):
        assert not left.exists()


def wait_until_joined(learner) -> None:
    """`wait_idle` is content without receivers; bytes show that one came."""
    while not learner.metrics()[names.SYNC_BYTES]:
        learner.wait_idle(WAIT_S)
    learner.wait_idle(WAIT_S)


def test_a_failed_engine_call_before_loading_keeps_the_old_weights(channel):
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        with publisher(keys, **channel) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)
                engine.refusals = 2
                learner.publish(2, weights(2))
                await receiver.wait_for_version(2, WAIT_S)
        assert engine.aborts == 2 and [version for version, _ in engine.swaps] == [1, 2]

    run(scenario())


def test_only_the_runs_client_key_gets_in():
    async def scenario():
        keys = new_keys()
        stranger = CurveKeys(keys.server_public, keys.server_secret, *zmq.curve_keypair())
        engine, strange = StagedEngine(), StagedEngine()
        with publisher(keys) as learner:
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            intruder = Receiver(strange, stranger, "actor-1", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(intruder), running(receiver):
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)
                await asyncio.to_thread(learner.wait_idle, WAIT_S)
        assert strange.swaps == [] and intruder.version == 0

    run(scenario())


def test_nonsense_from_a_peer_is_answered_and_harms_nobody():
    async def scenario():
        keys, engine = new_keys(), StagedEngine()
        with publisher(keys) as learner, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            secure_client(socket, keys)
            socket.connect(learner.endpoint)
            socket.send(b"\xc1nonsense")
            assert socket.poll(int(WAIT_S * 1000)) and b"not MessagePack" in socket.recv()
            receiver = Receiver(engine, keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(1))
                await receiver.wait_for_version(1, WAIT_S)

    run(scenario())


def test_m4_a_receiver_that_dies_in_a_transfer_is_noticed_without_waiting_for_its_silence(monkeypatch):
    monkeypatch.setattr("weightsync.publisher.SILENCE_S", 3600.0)
    keys = new_keys()
    with publisher(keys, timeout_s=3600.0) as learner, zmq.Context() as context:
        with context.socket(zmq.DEALER) as socket:
            secure_client(socket, keys)
            socket.connect(learner.endpoint)
            socket.send(encode(Join("actor-0", ("cpu@here",), "", 0)))
            learner.publish(1, weights(1))
            while not isinstance(decode(socket.recv()), Begin):
                pass
            with pytest.raises(TimeoutError, match="actor-0"):
                while True:  # the publisher's thread notes the transfer a moment after it began
                    learner.wait_idle(0.01)
        learner.wait_idle(WAIT_S)


@pytest.mark.parametrize("turns", range(6))
def test_a_transfer_is_let_go_even_in_the_moment_in_which_its_bytes_are_all_sent(turns):
    async def scenario():
        receiver = Receiver(StagedEngine(), new_keys(), "actor-0", WAIT_S, "recompute")
        sent = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(receiver._until_sent(sent))
        await asyncio.sleep(0)
        sent.set_result(Commit(1, 1, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        still_waits = waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() == still_waits

    run(scenario())


def test_nccl_without_cuda_ends_the_receiver_with_the_mend():
    async def scenario():
        keys = new_keys()
        with publisher(keys, backend="nccl") as learner:
            receiver = Receiver(
                StagedEngine(), keys, "actor-0", WAIT_S, "recompute", endpoint=learner.endpoint
            )
            with pytest.raises(SyncRefused, match='actor-0 has cpu and the learner cpu; set it to "auto"'):
                await asyncio.wait_for(receiver.run(), WAIT_S)

    run(scenario())


def test_m7_an_error_in_the_publishers_thread_reaches_the_learner(monkeypatch):
    keys = new_keys()
    with publisher(keys) as learner:
        monkeypatch.setattr(learner, "_perform", lambda actions: 1 / 0)
        with pytest.raises(RuntimeError, match="the weight publisher failed: division by zero"):
            learner.publish(1, weights(1))
            learner.wait_idle(WAIT_S)
        with pytest.raises(RuntimeError, match="division by zero"):
            learner.publish(2, weights(2))


def test_waiting_too_long_names_who_is_late():
    async def scenario():
        keys = new_keys()
        with publisher(keys) as learner:
            engine = HangingEngine()
            receiver = Receiver(engine, keys, "actor-7", WAIT_S, "recompute", endpoint=learner.endpoint)
            async with running(receiver):
                learner.publish(1, weights(1))
                await asyncio.wait_for(engine.begun.wait(), WAIT_S)
                with pytest.raises(TimeoutError, match=r"version 1 was not loaded within 0.01 s by: actor-7"):
                    while True:  # the publisher's thread notes the transfer a moment after it began
                        learner.wait_idle(0.01)
                        await asyncio.sleep(0)
                with pytest.raises(TimeoutError, match=r"actor-7 serves weight version 0; 1 did not come"):
                    await receiver.wait_for_version(1, 0.01)

    run(scenario())


def test_publish_needs_no_receiver():
    with publisher(new_keys()) as learner:
        learner.publish(1, weights(1))
        learner.publish(2, [(name, tensor.to(torch.float64)) for name, tensor in weights(2)])
        learner.wait_idle(WAIT_S)
        assert learner.metrics()[names.SYNC_SKIPPED] == 1
