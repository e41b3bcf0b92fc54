"""Publisher and receivers over real sockets and real gloo, with a fake engine."""

import asyncio

from tests.unit.weightsync.support import WAIT_S, StagedEngine, new_keys, publisher, running, weights
from weightsync.receiver import Receiver


def test_every_receiver_gets_every_version():
    async def scenario():
        keys = new_keys()
        with publisher(keys) as learner:
            engines = [StagedEngine(), StagedEngine()]
            receivers = [
                Receiver(e, keys, f"actor-{i}", WAIT_S, "recompute", endpoint=learner.endpoint)
                for i, e in enumerate(engines)
            ]
            async with running(receivers[0]), running(receivers[1]):
                for version in (1, 2, 3):
                    learner.publish(version, weights(version / 4))
                    for receiver in receivers:
                        await receiver.wait_for_version(version, WAIT_S)
                    assert [engine.values() for engine in engines] == [{version / 4}] * 2
                learner.wait_idle(WAIT_S)
                print(learner.metrics(), receivers[0].take_metrics())

    asyncio.run(scenario())
