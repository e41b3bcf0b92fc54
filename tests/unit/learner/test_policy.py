"""The packed forward against the plain one: the model sees each trajectory exactly as if it were alone."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from learner import attention
from learner.batch import plan
from learner.policy import Policy, choose_attention, load_policy
from tests.unit.learner.support import random_batch, settings

TEMPERATURE = 0.7
CPU = torch.device("cpu")


def tree_policy(folder, **more):
    return load_policy(
        folder, dtype="float32", attention_name=attention.NAME, temperature=TEMPERATURE, **more
    )


def loss_and_gradients(policy, batch, **changes):
    """Sum of weight * advantage * logprob over the batch, and its gradient for each weight."""
    policy.zero_grad()
    total = 0.0
    for micro in plan(batch, settings(**changes)).updates[0].ranks[0]:
        row = policy.row(micro, CPU)
        logprobs = policy(row)[0]
        loss = (row.weights * row.advantages * logprobs).sum()
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in policy.hf.named_parameters()}


def plain_loss_and_gradients(folder, batch):
    """The same by the textbook: one forward of transformers' own model for each trajectory."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    micro = plan(batch, settings(shared_prefix=False)).updates[0].ranks[0][0]
    total = torch.zeros(())
    for sequence, trajectory in enumerate(t for group in batch.groups for t in group):
        ids = torch.from_numpy(trajectory.token_ids).long()
        log_p = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
        logprobs = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(trajectory.action_mask[1:]).bool()
        mine = micro.sequence_of == sequence
        factor = torch.from_numpy(micro.weights[mine] * micro.advantages[mine])
        total = total + (factor * logprobs[mask]).sum()
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dense_limit", [0, 1024])  # both ways to compute a part
@pytest.mark.parametrize(
    "changes",
    [
        {"shared_prefix": True},
        {"shared_prefix": False},
        {"shared_prefix": True, "tokens_per_microbatch": 75},
    ],
)
@pytest.mark.parametrize("examples", [0, 40])  # tokens that all prompts share: without and with a root
def test_packed_equals_plain_in_loss_and_gradients(model_folder, monkeypatch, dense_limit, changes, examples):
    monkeypatch.setattr(attention, "_DENSE_LIMIT", dense_limit)
    batch = random_batch(examples=examples)
    loss, gradients = loss_and_gradients(tree_policy(model_folder), batch, **changes)
    wanted_loss, wanted = plain_loss_and_gradients(model_folder, batch)
    assert loss == pytest.approx(wanted_loss, abs=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_checkpointing_changes_nothing(untied_folder):
    batch = random_batch()
    plain = loss_and_gradients(tree_policy(untied_folder), batch)
    again = loss_and_gradients(tree_policy(untied_folder, gradient_checkpointing=True), batch)
    assert again[0] == pytest.approx(plain[0], abs=1e-6)
    for name, gradient in again[1].items():
        torch.testing.assert_close(gradient, plain[1][name], msg=name)


def test_t5_the_loss_has_gradient_exactly_where_an_action_is_predicted(model_folder):
    policy = tree_policy(model_folder)
    batch = random_batch(groups=1, members=2)
    kept = []

    def keep(_module, _inputs, output):
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    policy.hf.base_model.register_forward_hook(keep)
    micro = plan(batch, settings(shared_prefix=False)).updates[0].ranks[0][0]
    row = policy.row(micro, CPU)
    (row.weights * row.advantages * policy(row)[0]).sum().backward()
    has_gradient = (kept[0].grad[0] != 0).any(-1).numpy()
    in_packed_order = sorted(batch.groups[0], key=lambda t: -int(np.flatnonzero(t.action_mask)[-1]))
    ends = [int(np.flatnonzero(t.action_mask)[-1]) for t in in_packed_order]
    predicts_action = [t.action_mask[1 : end + 1] == 1 for t, end in zip(in_packed_order, ends, strict=True)]
    np.testing.assert_array_equal(has_gradient, np.concatenate(predicts_action))


def test_a_continuation_does_not_see_its_siblings(model_folder):
    policy = tree_policy(model_folder)
    batch = random_batch(groups=1, members=3)

    def first_member(batch):
        row = policy.row(plan(batch, settings()).updates[0].ranks[0][0], CPU)
        with torch.no_grad():
            return policy(row)[0][row.sequence_of == 0]

    before = first_member(batch)
    other = batch.groups[0][1]
    ids = other.token_ids.copy()
    ids[other.prompt_len :] = 5
    changed = (batch.groups[0][0], dataclasses.replace(other, token_ids=ids), batch.groups[0][2])
    torch.testing.assert_close(first_member(dataclasses.replace(batch, groups=(changed,))), before)


def test_the_reference_of_bfloat16_is_close(model_folder):
    """bf16 dense attention rounds scores; the result stays within bf16's usual noise."""
    policy = load_policy(
        model_folder, dtype="bfloat16", attention_name=attention.NAME, temperature=TEMPERATURE
    )
    micro = plan(random_batch(), settings()).updates[0].ranks[0][0]
    with torch.no_grad():
        low = policy(policy.row(micro, CPU))[0]
        exact_policy = tree_policy(model_folder)
        exact = exact_policy(exact_policy.row(micro, CPU))[0]
    assert (low - exact).abs().mean() < 0.02


def test_dropout_is_off_so_that_an_unchanged_policy_repeats(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = tree_policy(tmp_path / "model")
    layers = [m for m in policy.modules() if hasattr(m, "attention_dropout")]
    assert policy.training and layers
    assert all(layer.attention_dropout == 0.0 for layer in layers)


def test_a_model_that_scales_its_logits_is_refused(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        Policy(model, 1.0)


def test_a_model_whose_layers_would_leak_from_one_packed_trajectory_into_the_next_is_refused(tmp_path):
    """A convolution runs over the whole row: attention alone keeps sequences apart."""
    config = Lfm2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"outside plain attention \(conv\)"):
        tree_policy(tmp_path)


def test_a_block_longer_than_the_sliding_window_is_refused(model_folder):
    parts = attention.attention_parts(
        0, plan(random_batch(), settings()).updates[0].ranks[0][0].blocks, 1, torch.float32, CPU
    )
    states = torch.zeros(1, 2, 200, 8)
    with pytest.raises(ValueError, match="sliding window of 4"):
        attention.tree_attention(
            torch.nn.Identity(),
            states,
            states,
            states,
            None,
            attention_parts=parts,
            sliding_window=4,
        )


@pytest.mark.parametrize(
    ("setting", "shared", "device", "name"),
    [
        ("auto", True, "cuda", attention.NAME),
        ("auto", False, "cpu", attention.NAME),
        ("sdpa", False, "cuda", attention.NAME),
        ("flash_attention_2", False, "cuda", "flash_attention_2"),
    ],
)
def test_the_attention_is_chosen_by_setting_and_device(setting, shared, device, name):
    assert choose_attention(setting, shared, device) == name
