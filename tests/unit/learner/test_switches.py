"""Switches that change how a step is computed, never what: each is seen to be on, and to change nothing."""

import numpy as np
import pytest
import torch

from learner.batch import plan
from learner.trainer import Trainer
from metrics import names
from tests.unit.learner.support import random_batch, run_config

pytestmark = pytest.mark.usefixtures("process_group")


def make(folder, dtype="float32", **learner):
    return Trainer(run_config(dtype, warmup_steps=0, **learner), folder, rank=0, world=1, device="cpu")


def feed_forwards(trainer):
    return [m for name, m in trainer.policy.hf.named_modules() if name.endswith(".mlp")]


def steps(trainer, count=2):
    """Losses and gradient norms of some steps."""
    metrics = [trainer.train_step(random_batch(step=s, seed=s)) for s in range(1, count + 1)]
    return [[m[names.LOSS], m[names.GRAD_NORM]] for m in metrics]


def test_activation_checkpointing_computes_every_layer_again_in_the_backward_pass(model_folder):
    calls = {}
    for switch in (False, True):
        trainer = make(model_folder, gradient_checkpointing=switch)
        calls[switch] = 0

        def count(*_, switch=switch):
            calls[switch] += 1

        for block in feed_forwards(trainer):
            block.register_forward_pre_hook(count)
        curve = steps(trainer)
        if not switch:
            wanted = curve
    assert calls == {False: 2 * 2, True: 2 * 2 * 2}  # layers, steps and, with the switch, twice
    np.testing.assert_allclose(curve, wanted, rtol=1e-4)


def test_the_float32_head_multiplies_what_a_bfloat16_model_gives_it_in_float32(model_folder):
    """By hand from the hidden states: the bfloat16 head rounds every logit, the float32 one none."""
    errors = {}
    for switch in (False, True):
        trainer = make(model_folder, dtype="bfloat16", fp32_lm_head=switch)
        policy = trainer.policy
        row = policy.row(plan(random_batch(), trainer.settings).updates[0].ranks[0][0], trainer.device)
        with torch.no_grad():
            logprobs = policy(row)[0]
            hidden = policy.hf.base_model(row.token_ids, position_ids=row.position_ids, **row.attention)
        states = hidden.last_hidden_state[0, row.predict_from].float()
        weight = policy.hf.get_input_embeddings().weight.float()
        exact = torch.log_softmax(states @ weight.t().detach(), -1).gather(-1, row.targets[:, None])[:, 0]
        errors[switch] = float((logprobs - exact).abs().max())
        assert policy.dtype == torch.bfloat16  # the weights stay as they are
    assert errors[True] < 1e-5 < 1e-4 < errors[False]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}])
def test_compiled_feed_forwards_compute_the_same(model_folder, more):
    from torch._dynamo.utils import counters

    wanted = steps(make(model_folder, **more))
    torch.compiler.reset()
    counters.clear()
    trainer = make(model_folder, compile=True, **more)
    np.testing.assert_allclose(steps(trainer), wanted, rtol=1e-3)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
