import dataclasses
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from buffer.messages import Batch
from configs.schema import ActorsConfig
from learner import checkpoint
from learner.batch import plan
from learner.checkpoint import Progress
from learner.checkpointer import Checkpointer, CheckpointFailed
from learner.statistics import StepStatistics
from learner.trainer import Trainer, TrainingDiverged, learning_rate
from metrics import names
from tests.unit.learner.support import poisoned, random_batch, run_config
from weightsync.adapters import merged as merged_weights

pytestmark = pytest.mark.usefixtures("process_group")


def make(folder, dtype="float32", **learner):
    return Trainer(run_config(dtype, **learner), folder, rank=0, world=1, device="cpu")


def save(trainer, progress, folder, keep=2, keep_best=0, score=0.0):
    """A checkpoint, waited for."""
    checkpointer = Checkpointer(trainer, folder, keep, keep_best)
    checkpointer.start(progress, score)
    assert checkpointer.finish() == progress.step
    checkpointer.close()
    return folder / f"step-{progress.step}"


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def with_behaviour_of(trainer, batch):
    """The batch as the trainer's own present weights would have sampled it."""
    sampled = {}
    one_update = trainer.config.model_copy(update={"minibatches": 1})
    whole = dataclasses.replace(trainer.settings, learner=one_update)
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


def test_t6_every_statistic_is_over_action_tokens_and_no_others(model_folder):
    """By the textbook: one forward of transformers' own model per trajectory, then the mask."""
    from transformers import AutoModelForCausalLM

    batch = random_batch()
    metrics = make(model_folder, rollout_is="none", adv_estimator="dr_grpo").train_step(batch)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    entropies, gaps, clipped = [], [], []
    for group in batch.groups:
        mean = np.mean([t.reward for t in group])
        for t in group:
            ids, mask = torch.from_numpy(t.token_ids).long(), t.action_mask[1:].astype(bool)
            with torch.no_grad():
                log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
            gap = log_p.gather(-1, ids[1:, None])[:, 0].numpy() - t.logprobs[1:]
            entropies += (-(log_p.exp() * log_p).sum(-1)).numpy()[mask].tolist()
            gaps += gap[mask].tolist()
            better = t.reward > mean
            clipped += [(g > np.log(1.28)) if better else (g < np.log(0.8)) for g in gap[mask]]
    assert metrics[names.ENTROPY] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert metrics[names.LOGPROB_GAP_MEAN] == pytest.approx(np.mean(np.abs(gaps)), rel=1e-3)
    assert metrics[names.MISMATCH_KL] == pytest.approx(np.mean(np.expm1(gaps) - gaps), rel=1e-3)
    assert metrics[names.RATIO_MEAN] == pytest.approx(np.mean(np.exp(gaps)), rel=1e-4)
    assert 0 < np.mean(clipped) < 1
    assert metrics[names.CLIP_FRACTION] == pytest.approx(np.mean(clipped))


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
    trainer = make(model_folder, minibatches=4, lr=5e-3, warmup_steps=0)
    metrics = trainer.train_step(with_behaviour_of(trainer, random_batch(groups=4)))
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


# --- critic, KL in the reward, epochs -----------------------------------------------------------------


def test_the_critic_learns_the_returns_and_engines_never_see_it(model_folder):
    trainer = make(model_folder, adv_estimator="gae", critic_lr=0.05, value_clip=0.0, lr=1e-4)
    batch = random_batch()
    paid = tuple(tuple(dataclasses.replace(t, reward=1.0) for t in group) for group in batch.groups)
    batch = dataclasses.replace(batch, groups=paid)
    losses = [trainer.train_step(dataclasses.replace(batch, step=s))[names.VALUE_LOSS] for s in range(1, 9)]
    assert losses[0] == pytest.approx(0.5)  # the head begins at 0, every return is 1
    assert losses[-1] < 0.2 * losses[0]
    assert all("critic" not in name for name, _ in trainer.named_weights())
    rates = [group["lr"] for group in trainer.engine.optimizer.param_groups]
    assert rates == [1e-4, 0.05]


def test_kl_in_the_reward_punishes_those_who_moved(model_folder):
    """Two equal rewards: the one whose tokens gained probability since the start has the lower score."""
    trainer = make(
        model_folder, adv_estimator="dr_grpo", use_kl_in_reward=True, kl_coef=0.5, kl_estimator="k1"
    )
    first = random_batch(groups=1, members=2)
    trainer.engine.optimizer.param_groups[0]["lr"] = 1e-2
    for step in range(1, 4):
        trainer.train_step(dataclasses.replace(first, step=step))
    moved = {name: t for name, t in zip("ab", first.groups[0], strict=True)}
    up = max(moved.values(), key=lambda t: t.reward)
    equal = tuple(dataclasses.replace(t, reward=1.0) for t in first.groups[0])
    work, before = trainer._look_before(
        plan(dataclasses.replace(first, groups=(equal,)), trainer.settings), StepStatistics(trainer.device)
    )
    assert before.reference is not None
    (micro,) = work.updates[0].ranks[0]
    by_sequence = {int(s): micro.advantages[micro.sequence_of == s][0] for s in np.unique(micro.sequence_of)}
    assert by_sequence[up.index] < 0 < by_sequence[1 - up.index]


def test_epochs_go_over_the_batch_again_against_the_same_start(model_folder):
    batch = random_batch(groups=2)
    trainer = make(model_folder, lr=5e-3, warmup_steps=0)
    steps = []
    step = trainer.engine.step
    trainer.engine.step = lambda: steps.append(step())
    metrics = trainer.train_step(batch)
    assert len(steps) == 1 and metrics[names.RATIO_MEAN] == pytest.approx(1.0)
    once = metrics
    trainer = make(model_folder, lr=5e-3, warmup_steps=0, ppo_epochs=2, minibatches=2)
    step = trainer.engine.step
    trainer.engine.step = lambda: steps.append(step())
    metrics = trainer.train_step(batch)
    assert len(steps) == 1 + 4
    assert abs(metrics[names.RATIO_MEAN] - 1) > 1e-3
    assert metrics[names.TOKENS_UNPACKED] == 2 * once[names.TOKENS_UNPACKED]  # computed in both epochs
    assert metrics[names.TOKENS_PACKED] == 2 * once[names.TOKENS_PACKED]
    assert metrics[names.TOKENS_TRAINED] == once[names.TOKENS_TRAINED]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "dppo"])
def test_every_loss_raises_what_was_better_than_its_group(model_folder, loss):
    trainer = make(model_folder, policy_loss=loss, lr=3e-3, warmup_steps=0, minibatches=2)
    batch = with_behaviour_of(trainer, random_batch(groups=2))

    def preference():
        """Sum of advantage times logprob over all tokens."""
        total = 0.0
        for update in plan(batch, trainer.settings).updates:
            for micro in update.ranks[0]:
                row = trainer.policy.row(micro, trainer.device)
                with torch.no_grad():
                    total += float((row.advantages * trainer.policy(row)[0]).sum())
        return total

    before = preference()
    for step in range(1, 4):
        trainer.train_step(dataclasses.replace(batch, step=step))
    assert preference() > before + 0.1


def test_sft_learns_the_demonstrations_whatever_their_reward(model_folder):
    trainer = make(model_folder, policy_loss="sft", lr=3e-3, warmup_steps=0)
    batch = random_batch()
    flat = tuple(tuple(dataclasses.replace(t, reward=0.0) for t in group) for group in batch.groups)
    batch = dataclasses.replace(batch, groups=flat)
    losses = [trainer.train_step(dataclasses.replace(batch, step=s))[names.LOSS] for s in range(1, 6)]
    assert losses[0] == pytest.approx(np.log(320), rel=0.1) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "recipe",
    [{"adv_estimator": "gae"}, {"adv_estimator": "maxrl"}, {"use_kl_in_reward": True, "kl_coef": 0.1}],
)
def test_sft_ignores_how_the_recipe_turns_rewards_into_advantages(model_folder, recipe):
    """`launch.py sft` takes a recipe's section as it is: neither a critic nor a reward below 0 may matter."""
    batch = random_batch()
    bad = tuple(tuple(dataclasses.replace(t, reward=t.reward - 2.0) for t in group) for group in batch.groups)
    trained = []
    for changes in ({}, recipe):
        trainer = make(model_folder, policy_loss="sft", lr=1e-3, warmup_steps=0, **changes)
        trainer.train_step(dataclasses.replace(batch, groups=bad))
        assert trainer.policy.critic is None
        trained.append(weights_of(trainer))
    assert all(torch.equal(trained[0][name], tensor) for name, tensor in trained[1].items())


def test_engine_and_learner_that_disagree_are_said_loudly(model_folder, capsys):
    trainer = make(model_folder)
    agreed = trainer.train_step(with_behaviour_of(trainer, random_batch()))
    assert agreed[names.DISAGREE] == 0.0 and "DISAGREE" not in capsys.readouterr().err
    batch = random_batch()
    wrong = tuple(
        tuple(dataclasses.replace(t, logprobs=t.logprobs * np.float32(0.7)) for t in group)
        for group in batch.groups
    )
    metrics = trainer.train_step(dataclasses.replace(batch, groups=wrong))
    assert metrics[names.DISAGREE] == 1.0
    said = capsys.readouterr().err
    assert "ENGINE AND LEARNER DISAGREE" in said and "actors.temperature" in said


# --- adapters, float32 head -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_alone_and_are_published_merged(model_folder, tmp_path, dtype):
    pytest.importorskip("peft")
    trainer = make(model_folder, dtype=dtype, lora_rank=4, lr=1e-2, warmup_steps=0)
    plain = make(model_folder, dtype=dtype)
    before = weights_of(trainer)
    assert [(n, tuple(t.shape)) for n, t in before.items()] == [
        (n, tuple(t.shape)) for n, t in weights_of(plain).items()
    ]
    assert [m[0] for m in trainer.weight_metadata()] == list(before)
    for name, tensor in plain.named_weights():
        assert torch.equal(before[name], tensor), name  # B begins at 0
    batch = with_behaviour_of(trainer, random_batch())
    for step in (1, 2):
        trainer.train_step(dataclasses.replace(batch, step=step))
    changed = [n for n, t in trainer.named_weights() if not torch.equal(t, before[n])]
    assert changed and all("proj" in name for name in changed)
    # What travels is less, and engines make the same of it.
    sent = [(n, t.clone()) for n, t in trainer.published_weights()]
    assert [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in sent] == trainer.published_metadata()
    assert sum(t.numel() for _, t in sent) < sum(t.numel() for _, t in trainer.named_weights()) / 2
    in_engines = dict(merged_weights(sent, model_folder, getattr(torch, dtype)))
    rtol, atol = (1e-2, 2e-4) if dtype == "bfloat16" else (1e-5, 1e-6)  # a last bit of bfloat16
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(in_engines[name], tensor, rtol=rtol, atol=atol)
    # What engines get is the policy that trained: the merged model gives the same logprobs.
    checkpoint.export(trainer, tmp_path / "export")
    merged = make(tmp_path / "export", dtype=dtype)
    moved = with_behaviour_of(trainer, batch)
    gap = merged.train_step(dataclasses.replace(moved, step=1))[names.LOGPROB_GAP_MEAN]
    assert gap < (1e-5 if dtype == "float32" else 0.02)


def test_adapters_travel_merged_where_engines_would_not_find_the_weights(model_folder, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr("learner.lora.base_names", lambda base: {"model.another.name"})
    trainer = make(model_folder, lora_rank=4)
    assert trainer.published_metadata() == trainer.weight_metadata()
    assert [name for name, _ in trainer.published_weights()] == list(weights_of(trainer))


def test_an_adapters_export_loads_with_peft_and_its_checkpoint_resumes(model_folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    trainer = make(model_folder, lora_rank=4, lora_export="adapter", lr=1e-2, warmup_steps=0)
    trainer.train_step(random_batch(step=1))
    path = save(trainer, Progress(1, 1), tmp_path)
    checkpoint.export(trainer, tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "export").merge_and_unload()
    loaded = dict(merged.named_parameters())
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    again = make(model_folder, lora_rank=4)
    checkpoint.restore(again, path)
    for name, tensor in again.named_weights():
        torch.testing.assert_close(tensor, loaded[name], rtol=1e-5, atol=1e-6, msg=name)


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
    with pytest.raises(TrainingDiverged, match="3 steps in a row up to step 3"):
        trainer.train_step(poisoned(random_batch(step=3)))


def test_one_bad_batch_does_not_end_the_run_however_many_updates_it_spoils(model_folder):
    """A value that is no number is, through whitening, in every minibatch, and that in every epoch."""
    trainer = make(model_folder, adv_estimator="gae", minibatches=2, ppo_epochs=2)
    batch = random_batch(groups=2)
    critic = trainer.policy.critic
    critic.bias.data.fill_(float("nan"))
    metrics = trainer.train_step(batch)
    assert metrics[names.SKIPPED_STEPS] == 4
    critic.bias.data.zero_()
    assert trainer.train_step(dataclasses.replace(batch, step=2))[names.SKIPPED_STEPS] == 0
    assert trainer.skips_in_a_row == 0


def test_nan_in_bfloat16_skips_the_update(model_folder):
    trainer = make(model_folder, dtype="bfloat16", rollout_is="none")
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
    path = save(trainer, Progress(step=1, version=7), tmp_path)
    trainer.train_step(random_batch(step=2, seed=1))
    wanted = weights_of(trainer)
    again = make(model_folder, zero_stage=stage)
    assert checkpoint.restore(again, path) == Progress(step=1, version=7)
    again.train_step(random_batch(step=2, seed=1))
    for name, tensor in again.named_weights():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("wrote", "reads"), [(0, 2), (2, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_m9_a_checkpoint_resumes_under_another_zero_stage(model_folder, tmp_path, wrote, reads, dtype):
    trainer = make(model_folder, dtype=dtype, zero_stage=wrote)
    trainer.train_step(random_batch(step=1))
    path = save(trainer, Progress(1, 1), tmp_path)
    trainer.train_step(random_batch(step=2, seed=1))
    wanted = weights_of(trainer)
    again = make(model_folder, dtype=dtype, zero_stage=reads)
    checkpoint.restore(again, path)
    again.train_step(random_batch(step=2, seed=1))
    for name, tensor in again.named_weights():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_newest_and_the_best_checkpoints_are_kept(model_folder, tmp_path):
    trainer = make(model_folder)
    for step, score in ((1, 0.3), (2, 0.9), (3, 0.1), (10, 0.2)):
        save(trainer, Progress(step, step), tmp_path, keep=1, keep_best=1, score=score)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert Checkpointer(trainer, tmp_path, 1, 1).oldest_step() == 10  # the buffer need not keep for step 2


def test_no_checkpoint_is_dropped_while_there_are_fewer_than_the_best_to_keep(model_folder, tmp_path):
    trainer = make(model_folder)
    for step in (1, 2, 3):
        save(trainer, Progress(step, step), tmp_path, keep=1, keep_best=4, score=step)
    assert [p.name for p in checkpoint.complete_ones(tmp_path)] == ["step-1", "step-2", "step-3"]


def test_the_next_step_trains_while_a_checkpoint_is_written(model_folder, tmp_path, monkeypatch):
    """What is written is the state at `start`, and nobody is told before it is complete."""
    trainer = make(model_folder)
    trainer.train_step(random_batch(step=1))
    wanted = weights_of(trainer)
    may_write = threading.Event()
    write = checkpoint.write

    def write_when_allowed(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", write_when_allowed)
    checkpointer = Checkpointer(trainer, tmp_path, keep=1, keep_best=0)
    checkpointer.start(Progress(1, 1), 0.0)
    trainer.train_step(random_batch(step=2))
    assert checkpointer.poll() is None and checkpoint.latest(tmp_path) is None
    may_write.set()
    assert checkpointer.finish() == 1
    again = make(model_folder)
    checkpoint.restore(again, tmp_path / "step-1")
    for name, tensor in again.named_weights():
        assert torch.equal(tensor, wanted[name]), name
    checkpointer.close()


def test_a_disk_that_refuses_stops_the_run_with_the_reason(model_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    checkpointer = Checkpointer(make(model_folder), tmp_path, keep=1, keep_best=0)
    checkpointer.start(Progress(4, 4), 0.0)
    with pytest.raises(CheckpointFailed, match=r"step 4 .* No space left on device"):
        checkpointer.finish()
    checkpointer.close()


@pytest.mark.parametrize("dies_in", ["write", "complete"])
def test_a_kill_before_the_rename_leaves_the_last_good_checkpoint(
    model_folder, tmp_path, monkeypatch, dies_in
):
    trainer = make(model_folder)
    good = save(trainer, Progress(1, 1), tmp_path, keep=1)

    class Killed(BaseException):
        pass

    synced = []

    def die(folder):
        synced.append(folder)
        if len(synced) == (1 if dies_in == "write" else 2):  # after everything is written, before the rename
            raise Killed

    monkeypatch.setattr(checkpoint, "_sync", die)
    taken = checkpoint.snapshot(trainer, Progress(2, 2), 0.0)
    with pytest.raises(Killed):
        checkpoint.write(taken, tmp_path)
        checkpoint.complete(taken, tmp_path, 1, 0)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == good
    assert checkpoint.restore(make(model_folder), good).step == 1
    save(trainer, Progress(2, 2), tmp_path, keep=1)  # what was left behind is no obstacle
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_that_looks_complete(
    model_folder, tmp_path, monkeypatch
):
    trainer = make(model_folder)
    save(trainer, Progress(1, 1), tmp_path, keep=1)
    rmtree = checkpoint.shutil.rmtree

    def die(folder, **more):
        (folder / "config.json").unlink()  # some of its files are gone
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    taken = checkpoint.snapshot(trainer, Progress(2, 2), 0.0)
    checkpoint.write(taken, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.complete(taken, tmp_path, 1, 0)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    assert checkpoint.complete_ones(tmp_path) == [tmp_path / "step-2"]
    Checkpointer(trainer, tmp_path, 1, 0).close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_rank_syncs_its_own_files_while_those_of_others_come_and_go(model_folder, tmp_path):
    taken = checkpoint.snapshot(make(model_folder), Progress(1, 1), 0.0)
    work = tmp_path / ".step-1.partial"
    work.mkdir()
    (work / ".tmp-of-another-rank").symlink_to(work / "just-renamed")
    checkpoint.write(taken, tmp_path)
    assert (work / "training" / "rank-0.safetensors").is_file()


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None


def test_a_checkpoint_is_a_model_folder(model_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make(model_folder)
    trainer.train_step(random_batch())
    path = save(trainer, Progress(1, 1), tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(path).chat_template


def test_a_checkpoint_of_another_kind_is_refused(model_folder, tmp_path):
    path = save(make(model_folder), Progress(1, 1), tmp_path)
    with pytest.raises(ValueError, match=r"no weight of critic\.weight.*learner\.adv_estimator"):
        checkpoint.restore(make(model_folder, adv_estimator="gae"), path)
    (path / "state.json").write_text('{"step": 1, "version": 1, "zero_stage": 0, "world": 1}')
    with pytest.raises(ValueError, match="older format"):
        checkpoint.restore(make(model_folder), path)


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


def test_the_probe_is_what_the_plain_model_says_at_temperature_1(model_folder):
    config = run_config().model_copy(update={"actors": ActorsConfig(temperature=0.5)})
    trainer = Trainer(config, model_folder, rank=0, world=1, device="cpu")
    ids, logprobs = trainer.probe()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert trainer.probe()[0] == ids and trainer.policy.hf.get_output_embeddings().temperature == 0.5
