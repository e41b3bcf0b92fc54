import dataclasses

import numpy as np
import pytest

from buffer.messages import Batch, StopReason
from learner import batch as batch_module
from learner.batch import Block, plan
from tests.unit.learner.support import random_batch, settings, trajectory

SENTINEL = 299  # marks observation tokens


def one_row(batch, **changes):
    (update,) = plan(batch, settings(**changes)).updates
    (micro,) = update.ranks[0]
    return micro


def two_members():
    a = trajectory(0, 0, [10, 11, 12], [20, 21, SENTINEL, 22], [1, 1, 0, 1], reward=1.0)
    b = trajectory(0, 1, [10, 11, 12], [30, SENTINEL, SENTINEL, 31, 32], [1, 0, 0, 1, 1], reward=0.0)
    return Batch(1, 0, ((a, b),))


def test_the_shared_prompt_is_laid_out_once():
    micro = one_row(two_members())
    # The last target of a member is never an input: nothing is predicted from it.
    assert micro.token_ids[0].tolist() == [10, 11, 12, 20, 21, SENTINEL, 30, SENTINEL, SENTINEL, 31]
    assert micro.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert micro.blocks == (Block(0, 3, (3, 4)),)
    assert micro.targets.tolist() == [20, 21, 22, 30, 31, 32]
    # Both first tokens are predicted from the prompt's last position, 2.
    assert micro.predict_from.tolist() == [2, 3, 5, 2, 8, 9]
    assert micro.sequence_of.tolist() == [0, 0, 0, 1, 1, 1]


def test_without_sharing_each_trajectory_is_a_block():
    micro = one_row(two_members(), shared_prefix=False)
    assert micro.blocks == (Block(0, 7), Block(7, 6))
    longer_first = [10, 11, 12, 30, SENTINEL, SENTINEL, 31, 10, 11, 12, 20, 21, SENTINEL]
    assert micro.token_ids[0].tolist() == longer_first
    assert micro.predict_from.tolist() == [2, 5, 6, 9, 10, 12]


@pytest.mark.parametrize("shared", [True, False])
def test_t5_observations_are_never_targets_and_every_action_is(shared):
    batch = random_batch()
    marked = tuple(
        tuple(
            dataclasses.replace(
                t, token_ids=np.where(t.action_mask, t.token_ids % 290, SENTINEL).astype(np.int32)
            )
            for t in group
        )
        for group in batch.groups
    )
    micro = one_row(dataclasses.replace(batch, groups=marked), shared_prefix=shared)
    assert SENTINEL not in micro.targets
    assert len(micro.targets) == sum(int(t.action_mask.sum()) for g in marked for t in g)


def test_members_whose_prompts_differ_share_what_is_equal():
    a = trajectory(0, 0, [1, 2, 3], [9], [1])
    b = trajectory(0, 1, [1, 2, 4], [9, 9], [1, 1])
    micro = one_row(Batch(1, 0, ((a, b),)))
    assert micro.blocks == (Block(0, 2, (1, 2)),)
    assert micro.token_ids[0].tolist() == [1, 2, 3, 4, 9]
    assert micro.predict_from.tolist() == [2, 3, 4]


def test_the_examples_that_all_prompts_begin_with_are_laid_out_once(monkeypatch):
    monkeypatch.setattr(batch_module, "_SHORTEST_ROOT", 2)
    first = tuple(trajectory(0, i, [1, 2, 3, 4], [20 + i, 9], [1, 1]) for i in range(2))
    second = tuple(trajectory(1, i, [1, 2, 5], [30 + i, 9], [1, 1]) for i in range(2))
    micro = one_row(Batch(1, 0, (first, second)))
    assert micro.root == 2
    assert micro.token_ids[0].tolist() == [1, 2, 3, 4, 20, 21, 5, 30, 31]
    assert micro.position_ids[0].tolist() == [0, 1, 2, 3, 4, 4, 2, 3, 3]
    assert micro.blocks == (Block(2, 2, (1, 1)), Block(6, 1, (1, 1)))
    assert micro.targets.tolist() == [20, 9, 21, 9, 30, 9, 31, 9]
    assert micro.predict_from.tolist() == [3, 4, 3, 5, 6, 7, 6, 8]


def test_a_question_that_ends_with_the_root_is_predicted_from_the_root(monkeypatch):
    monkeypatch.setattr(batch_module, "_SHORTEST_ROOT", 2)
    first = tuple(trajectory(0, i, [1, 2], [20 + i, 9], [1, 1]) for i in range(2))
    second = tuple(trajectory(1, i, [1, 2, 5], [30 + i, 9], [1, 1]) for i in range(2))
    micro = one_row(Batch(1, 0, (first, second)))
    assert micro.root == 2
    assert micro.predict_from[np.isin(micro.targets, [20, 21])].tolist() == [1, 1]


def test_a_short_common_beginning_is_not_worth_a_root():
    assert one_row(random_batch(examples=10)).root == 0
    assert one_row(random_batch(examples=40)).root == 40
    assert one_row(random_batch(examples=40), shared_prefix=False).root == 0


def test_the_root_counts_against_the_budget_of_every_row():
    (update,) = plan(random_batch(groups=6, examples=40), settings(tokens_per_microbatch=100)).updates
    rows = update.ranks[0]
    assert len(rows) > 1
    assert all(row.root == 40 and row.token_ids.shape[1] <= 100 for row in rows)


def test_one_token_answers_need_the_prompt_only():
    group = tuple(trajectory(0, i, [1, 2], [7 + i], [1]) for i in range(3))
    micro = one_row(Batch(1, 0, (group,)))
    assert micro.blocks == (Block(0, 2, ()),)
    assert micro.predict_from.tolist() == [1, 1, 1]


def test_a_group_larger_than_the_budget_is_cut_and_its_prompt_repeated():
    batch = random_batch(groups=1, members=8, prompt=20)
    (update,) = plan(batch, settings(tokens_per_microbatch=60)).updates
    assert len(update.ranks[0]) > 1
    assert all(micro.token_ids.shape[1] <= 60 for micro in update.ranks[0])
    sequences = [s for micro in update.ranks[0] for s in np.unique(micro.sequence_of)]
    assert sorted(sequences) == list(range(8))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("budget", [50, 4096])
def test_weights_do_not_depend_on_ranks_or_micro_batches(world, mode, budget):
    batch = random_batch(groups=4, members=4)
    changes = {"loss_agg_mode": mode}
    whole = one_row(batch, **changes)
    (update,) = plan(batch, settings(**changes, world=world, tokens_per_microbatch=budget)).updates
    by_token = {}
    for micro in (micro for rank in update.ranks for micro in rank if micro.weights.any()):
        for sequence, weight in zip(micro.sequence_of, micro.weights, strict=True):
            by_token.setdefault(int(sequence), []).append(weight)
    for sequence in np.unique(whole.sequence_of):
        np.testing.assert_allclose(by_token[int(sequence)], whole.weights[whole.sequence_of == sequence])


def test_every_rank_runs_equally_many_micro_batches_and_the_load_is_balanced():
    batch = random_batch(groups=7, members=4, prompt=30)
    (update,) = plan(batch, settings(world=3, tokens_per_microbatch=150)).updates
    assert len({len(rank) for rank in update.ranks}) == 1
    loads = [sum(m.token_ids.shape[1] for m in rank) for rank in update.ranks]
    assert max(loads) < 1.6 * min(loads)


def test_the_plan_says_how_uneven_its_ranks_are():
    groups = tuple(
        (trajectory(g, 0, [1, 2] * 20, [7 + g] * (10 * g + 1), [1] * (10 * g + 1)),) for g in (0, 6)
    )
    batch = Batch(1, 0, groups)
    assert plan(batch, settings(shared_prefix=False)).imbalance == 0.0
    # 40 and 100 tokens, and what their attention costs: the dearest has 113 where the mean is 78
    assert plan(batch, settings(shared_prefix=False, world=2)).imbalance == pytest.approx(0.45, abs=0.1)


def test_fewer_groups_than_ranks_are_cut_so_that_no_rank_idles():
    (update,) = plan(random_batch(groups=1, members=6), settings(world=3)).updates
    assert all(any(m.weights.any() for m in rank) for rank in update.ranks)


def test_a_rank_without_work_keeps_step_with_weight_zero():
    lonely = Batch(1, 0, ((trajectory(0, 0, [1, 2], [3], [1]),),))
    (update,) = plan(lonely, settings(world=2)).updates
    assert [len(rank) for rank in update.ranks] == [1, 1]
    assert update.ranks[1][0].weights.tolist() == [0.0]


def test_minibatches_split_the_groups():
    result = plan(random_batch(groups=5), settings(minibatches=2))
    counts = [len({int(s) for m in u.ranks[0] for s in m.sequence_of}) for u in result.updates]
    assert counts == [9, 6]


def test_a_truncated_trajectory_has_a_say_in_the_mean_but_no_loss():
    cut = trajectory(0, 0, [1, 2], [3, 4], [1, 1], reward=0.0, stop_reason=StopReason.MAX_TOKENS)
    done = trajectory(0, 1, [1, 2], [5, 6], [1, 1], reward=1.0)
    micro = one_row(Batch(1, 0, ((cut, done),)), mask_truncated=True, adv_estimator="dr_grpo")
    assert micro.targets.tolist() == [5, 6]
    assert micro.advantages.tolist() == [0.5, 0.5]
    assert micro.weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_is_over_the_tokens_in_the_loss(estimator):
    """Truncated trajectories are the longest: their tokens would decide mean and spread of the others."""
    kept = [trajectory(0, i, [5, 6], [7] * 4, [1] * 4, reward=float(i % 2)) for i in range(4)]
    cut = [
        trajectory(0, i, [5, 6], [7] * 40, [1] * 40, stop_reason=StopReason.MAX_TOKENS) for i in range(4, 8)
    ]
    settings_ = settings(adv_estimator=estimator, mask_truncated=True)
    ((micro,),) = plan(Batch(1, 0, ((*kept, *cut),)), settings_).updates[0].ranks
    assert micro.advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert micro.advantages.std() == pytest.approx(1.0, rel=1e-4)


def test_a_batch_without_any_target_is_one_idle_micro_batch():
    cut = trajectory(0, 0, [1, 2], [3], [1], stop_reason=StopReason.DEADLINE)
    micro = one_row(Batch(1, 0, ((cut,),)), mask_truncated=True)
    assert micro.weights.tolist() == [0.0]


def test_a_first_token_marked_as_sampled_is_refused_by_name():
    wrong = trajectory(3, 1, [], [4, 5], [1, 1])
    with pytest.raises(ValueError, match="g3/1"):
        plan(Batch(1, 0, ((wrong,),)), settings())


def test_the_plan_counts_what_sharing_saves():
    result = plan(two_members(), settings())
    assert (result.tokens_action, result.tokens_packed, result.tokens_unpacked) == (6, 10, 15)
