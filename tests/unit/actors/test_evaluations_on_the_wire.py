"""An actor and the buffer's own broker, every message encoded and decoded: evaluations during training."""

from collections import Counter

from buffer.codec import decode, encode
from buffer.messages import CommitStep, GetBatch, PutTrajectory
from metrics import names
from tests.fakes import FakeWeights
from tests.tiny import tiny_tokenizer
from tests.unit.actors.test_actor import make_actor, run
from tests.unit.buffer.support import Buffer, config

ANSWERS = {"12": "<answer>84</answer><|im_end|>", "6": "<answer>13</answer><|im_end|>"}
HELD_OUT = [(0, {"question": "12 and 72?", "answer": "84"}), (0, {"question": "6 and 6?", "answer": "12"})]


class Wire:
    """What the actor asks goes to a real broker; after each put the learner takes the step that it can."""

    def __init__(self, buffer, on_version):
        self.buffer, self.on_version = buffer, on_version
        self.put = Counter()

    async def call(self, message, timeout_s):
        if isinstance(message, PutTrajectory):
            self.put[message.trajectory.group_id.startswith("eval-")] += 1
        reply = decode(encode(self.buffer(decode(encode(message)))))
        step = self.buffer.status().step + 1
        if isinstance(message, PutTrajectory) and step <= 4 and self.buffer(GetBatch(step, 0.0)).batch:
            self.buffer(CommitStep(step, step))
            self.on_version(step)
        return reply


def test_an_actor_evaluates_between_its_training_groups_and_the_run_ends_balanced(tmp_path):
    run_config = config(steps=4, batch=1, evaluate_every=2, drop_zero_variance=False, heartbeat_s=0.01)
    buffer = Buffer(tmp_path / "buffer.sqlite", run_config, num_prompts=1, num_held_out=2)
    weights = FakeWeights()
    actor, engine = make_actor(None, weights=weights)
    tokenizer = tiny_tokenizer()

    def answer(prompt, *_):
        text = tokenizer.decode(prompt)
        return tokenizer.encode(next(ANSWERS[key] for key in ANSWERS if f"{key} " in text))

    def publish(version):
        weights.version = engine.version = version

    engine._script = answer
    wire = Wire(buffer, publish)
    actor._client, actor._held_out = wire, HELD_OUT
    run(actor)
    (found,) = (metrics for _, role, _, _, metrics in buffer.status().reports if role == "eval")
    assert found[names.EVAL_STEP] == 2 and found[names.EVAL_SUCCESS] == 0.5
    assert found[names.EVAL_VERSION_MIN] >= found[names.EVAL_VERSION] == 2
    assert buffer.status().held_out == {"leased": 2, "done": 2, "running": 0, "dropped": 0}
    assert buffer.status().balanced and buffer.broker.audit() == [] and wire.put[True] == 2
    buffer.close()
