import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from buffer.messages import Batch
from learner import checkpoint
from learner.batch import plan
from learner.checkpoint import Progress
from learner.trainer import Trainer, TrainingDiverged, learning_rate
from metrics import names
from tests.unit.learner.support import random_batch, run_config

pytestmark = pytest.mark.usefixtures("process_group")


def make(folder, **learner):
    return Trainer(run_config(**learner), folder, rank=0, world=1, device="cpu")


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def with_behaviour_of(trainer, batch):
    """The batch as the trainer's own present weights would have sampled it."""
    sampled = {}
    whole = dataclasses.replace(trainer.settings, minibatches=1)
    for micro in plan(batch, whole).updates[0].ranks[0]:
        row = trainer.policy.row(micro, trainer.device)
        with torch.no_grad():
            logprobs = trainer.policy(row)[0].numpy()
        for sequence in np.unique(micro.sequence_of):
            sampled[int(sequence)] = logprobs[micro.sequence_of == sequence]
    sequence, groups = 0, []
    for group in batch.groups:
        members = []
        for t in group:
            behaviour = np.zeros(len(t.token_ids), dtype=np.float32)
            behaviour[t.action_mask.astype(bool)] = sampled[sequence]
            members.append(dataclasses.replace(t, logprobs=behaviour))
            sequence += 1
        groups.append(tuple(members))
    return dataclasses.replace(batch, groups=tuple(groups))


def poisoned(batch, value=float("nan")):
    """The first group's first action token carries a logprob that is no number."""
    first = batch.groups[0][0]
    logprobs = first.logprobs.copy()
    logprobs[np.flatnonzero(first.action_mask)[0]] = value
    changed = (dataclasses.replace(first, logprobs=logprobs), *batch.groups[0][1:])
    return dataclasses.replace(batch, groups=(changed, *batch.groups[1:]))


# --- the step ---------------------------------------------------------------------------------


def test_a_step_changes_the_weights_and_reports_every_metric(model_folder):
    trainer = make(model_folder, kl_coef=0.1, entropy_coef=0.01)
    before = weights_of(trainer)
    metrics = trainer.train_step(random_batch())
    timed_by_the_loop = {names.STEP_S, names.WAIT_S, names.TRAIN_S, names.PUBLISH_S}
    learners = {value for value in vars(names).values() if str(value).startswith("learner/")}
    assert metrics.keys() == learners - timed_by_the_loop
    assert all(np.isfinite(list(metrics.values())))
    assert metrics[names.GRAD_NORM] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.named_weights())


@pytest.mark.parametrize("changes", [{}, {"rollout_is": "sequence"}, {"rollout_is": "none"}])
def test_t9_an_unchanged_policy_shows_ratio_one_and_no_mismatch(model_folder, changes):
    trainer = make(model_folder, **changes)
    metrics = trainer.train_step(with_behaviour_of(trainer, random_batch()))
    assert metrics[names.RATIO_MEAN] == pytest.approx(1.0, abs=1e-5)
    assert metrics[names.LOGPROB_GAP_MAX] < 1e-5
    assert metrics[names.MISMATCH_KL] == pytest.approx(0.0, abs=1e-8)
    assert metrics[names.CLIP_FRACTION] == 0.0


def test_the_micro_batch_split_does_not_change_the_step(model_folder):
    batch = random_batch(groups=4)
    results = []
    for budget in (4096, 45):
        trainer = make(model_folder, tokens_per_microbatch=budget)
        results.append((trainer.train_step(batch), weights_of(trainer)))
    (whole, whole_weights), (split, split_weights) = results
    for name in (names.LOSS, names.GRAD_NORM, names.ENTROPY, names.MISMATCH_KL, names.LOGPROB_GAP_MAX):
        assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    for name, tensor in whole_weights.items():
        # Adam's first step is the gradient's sign times lr: only tiny gradients may differ in it.
        assert ((tensor - split_weights[name]).abs() > 1e-5).float().mean() < 0.01, name


def test_later_minibatches_are_measured_against_the_policy_at_the_steps_start(model_folder):
    trainer = make(model_folder, minibatches=3, lr=5e-3, warmup_steps=0)
    metrics = trainer.train_step(with_behaviour_of(trainer, random_batch(groups=3)))
    assert metrics[names.LOGPROB_GAP_MAX] < 1e-5  # the engine's mismatch, before any update
    assert abs(metrics[names.RATIO_MEAN] - 1) > 1e-3  # but the policy has moved since


def test_training_raises_the_probability_of_what_was_rewarded(model_folder):
    trainer = make(model_folder, lr=3e-3, warmup_steps=0)
    batch = with_behaviour_of(trainer, random_batch())
    losses = [trainer.train_step(dataclasses.replace(batch, step=s))[names.LOSS] for s in range(1, 6)]
    assert losses[-1] < losses[0] - 0.01


def test_the_kl_to_the_initial_model_starts_at_zero_and_grows(model_folder):
    trainer = make(model_folder, kl_coef=0.05, lr=5e-3, warmup_steps=0)
    first = trainer.train_step(random_batch())[names.KL_REF]
    second = trainer.train_step(random_batch(step=2))[names.KL_REF]
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-4


def test_no_reference_model_is_kept_without_a_kl_term(model_folder):
    assert make(model_folder).reference is None


def test_a_batch_without_contrast_changes_nothing(model_folder):
    trainer = make(model_folder)
    before = weights_of(trainer)
    batch = random_batch()
    flat = tuple(tuple(dataclasses.replace(t, reward=1.0) for t in group) for group in batch.groups)
    metrics = trainer.train_step(dataclasses.replace(batch, groups=flat))
    assert metrics[names.GRAD_NORM] == 0.0
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


# --- NaN and Inf ------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_nan_skips_the_update_and_names_the_groups(model_folder, capsys, changes):
    trainer = make(model_folder, rollout_is="none", **changes)
    before = weights_of(trainer)
    metrics = trainer.train_step(poisoned(random_batch()))
    assert metrics[names.SKIPPED_STEPS] == 1
    assert "g0, g1, g2" in capsys.readouterr().err
    for name, tensor in trainer.named_weights():
        assert torch.equal(tensor, before[name]), name
    assert trainer.train_step(random_batch(step=2))[names.SKIPPED_STEPS] == 0
    assert all(torch.isfinite(tensor).all() for _, tensor in trainer.named_weights())


def test_three_skips_in_a_row_end_the_run(model_folder):
    trainer = make(model_folder, rollout_is="none")
    for step in (1, 2):
        trainer.train_step(poisoned(random_batch(step=step)))
    with pytest.raises(TrainingDiverged, match="3 updates in a row up to step 3"):
        trainer.train_step(poisoned(random_batch(step=3)))


def test_nan_in_bfloat16_skips_the_update(model_folder):
    config = run_config(rollout_is="none")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    trainer = Trainer(config, model_folder, rank=0, world=1, device="cpu")
    assert trainer.train_step(poisoned(random_batch()))[names.SKIPPED_STEPS] == 1
    assert all(torch.isfinite(tensor).all() for _, tensor in trainer.named_weights())
    assert trainer.train_step(random_batch(step=2))[names.SKIPPED_STEPS] == 0


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_named_weights_are_whole_and_match_the_metadata(model_folder, stage):
    trainer = make(model_folder, zero_stage=stage)
    got = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in trainer.named_weights()]
    assert got == trainer.weight_metadata()
    assert "lm_head.weight" not in dict(trainer.named_weights())  # tied: sent once, as the embedding
    assert all(tensor.numel() for _, tensor in trainer.named_weights())


def test_an_untied_head_is_sent_under_its_own_name(untied_folder):
    assert "lm_head.weight" in [name for name, _, _ in make(untied_folder).weight_metadata()]


def test_the_learning_rate_schedule():
    config = run_config(lr=1.0, warmup_steps=4, steps=14).learner
    assert [learning_rate(s, config) for s in (1, 2, 4, 5, 14)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = config.model_copy(update={"lr_schedule": "linear"})
    assert [learning_rate(s, linear) for s in (4, 9, 14)] == pytest.approx([1.0, 0.55, 0.1])
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert [learning_rate(s, cosine) for s in (4, 9, 14)] == pytest.approx([1.0, 0.55, 0.1])
    assert learning_rate(1, config.model_copy(update={"warmup_steps": 0})) == 1.0


# --- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(model_folder, tmp_path, stage):
    trainer = make(model_folder, zero_stage=stage)
    trainer.train_step(random_batch(step=1))
    path = checkpoint.save(trainer, Progress(step=1, version=7), tmp_path, keep=2)
    trainer.train_step(random_batch(step=2, seed=1))
    wanted = weights_of(trainer)
    again = make(model_folder, zero_stage=stage)
    assert checkpoint.restore(again, path) == Progress(step=1, version=7)
    again.train_step(random_batch(step=2, seed=1))
    for name, tensor in again.named_weights():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=name)


def test_only_the_newest_checkpoints_are_kept(model_folder, tmp_path):
    trainer = make(model_folder)
    for step in (1, 2, 10):
        checkpoint.save(trainer, Progress(step, step), tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert checkpoint.oldest_step(tmp_path) == 2


def test_a_kill_before_the_rename_leaves_the_last_good_checkpoint(model_folder, tmp_path, monkeypatch):
    trainer = make(model_folder)
    good = checkpoint.save(trainer, Progress(1, 1), tmp_path, keep=1)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    monkeypatch.setattr(checkpoint, "_sync", die)  # after everything is written, before the rename
    with pytest.raises(Killed):
        checkpoint.save(trainer, Progress(2, 2), tmp_path, keep=1)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == good
    assert checkpoint.restore(make(model_folder), good).step == 1
    checkpoint.save(trainer, Progress(2, 2), tmp_path, keep=1)  # what was left behind is no obstacle
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.oldest_step(tmp_path) == 0


def test_a_checkpoint_of_another_zero_stage_is_refused(model_folder, tmp_path):
    path = checkpoint.save(make(model_folder), Progress(1, 1), tmp_path, keep=1)
    with pytest.raises(ValueError, match=r"resume with the same learner\.zero_stage"):
        checkpoint.restore(make(model_folder, zero_stage=2), path)


@pytest.mark.parametrize("folder_name", ["model_folder", "untied_folder"])
def test_the_export_loads_in_transformers_with_tokenizer_and_template(request, tmp_path, folder_name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make(request.getfixturevalue(folder_name))
    trainer.train_step(random_batch())
    checkpoint.export(trainer, tmp_path / "export")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    loaded = dict(model.named_parameters())
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_empty_batch_is_harmless(model_folder):
    assert dist.get_world_size() == 1
    metrics = make(model_folder).train_step(Batch(step=1, version=0, groups=()))
    assert metrics[names.TOKENS_TRAINED] == 0
