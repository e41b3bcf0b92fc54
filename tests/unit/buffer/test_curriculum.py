"""Prompts that taught nothing rest and come back: through the broker, on a real store."""

import pytest

from buffer.messages import PutTrajectory
from configs.shares import Place, Share, locate
from tests.unit.buffer.support import Buffer, config, member


@pytest.fixture
def open_buffer(tmp_path):
    opened = []

    def open_one(num_prompts, max_rest, shares=(), **settings):
        settings = {"batch": 1, "staleness": 0, "curriculum_max_rest": max_rest, **settings}
        path = tmp_path / f"{len(opened)}.sqlite"
        opened.append(Buffer(path, config(**settings), num_prompts, shares))
        return opened[-1]

    yield open_one
    for buffer in opened:
        buffer.close()


class Learner:
    """Rolls the leases out by `rewards` (prompt index to the members' rewards) and trains what can be."""

    def __init__(self, buffer, rewards):
        self.buffer, self.rewards, self.step = buffer, rewards, 0
        self.visits = []  # (epoch, prompt), in order

    def visit(self, groups):
        for _ in range(groups):
            (lease,) = self.buffer.lease(most=1)
            self.visits.append((lease.epoch, lease.prompt_index))
            for index, reward in enumerate(self.rewards(lease.prompt_index)):
                self.buffer(PutTrajectory(member(lease, index, reward=reward, version=lease.version)))
            if self.buffer.batch(self.step + 1) is not None:
                self.step += 1
                self.buffer.train(self.step)
        return self

    def epochs_of(self, prompt):
        return [epoch for epoch, visited in self.visits if visited == prompt]


SOLVED, HOPELESS, USEFUL = 0, 1, 2


def by_kind(prompt):
    return {SOLVED: (1.0, 1.0), HOPELESS: (0.0, 0.0), USEFUL: (0.0, 1.0)}[prompt]


def test_the_solved_and_the_hopeless_rest_twice_as_long_each_time_up_to_the_limit(open_buffer):
    learner = Learner(open_buffer(3, max_rest=4), by_kind).visit(40)
    for prompt in (SOLVED, HOPELESS):
        assert learner.epochs_of(prompt)[:6] == [0, 2, 5, 10, 15, 20]
    assert learner.epochs_of(USEFUL) == list(range(max(learner.epochs_of(USEFUL)) + 1))


def test_without_the_setting_nobody_rests(open_buffer):
    learner = Learner(open_buffer(3, max_rest=0), by_kind).visit(12)
    assert sorted(learner.visits) == [(epoch, prompt) for epoch in range(4) for prompt in range(3)]


def test_a_prompt_that_has_come_within_reach_is_visited_in_every_epoch_again(open_buffer):
    rewards = {SOLVED: (1.0, 1.0), HOPELESS: (0.0, 0.0), USEFUL: (0.0, 1.0)}
    learner = Learner(open_buffer(3, max_rest=8), rewards.get).visit(10)
    rewards[HOPELESS] = (0.0, 1.0)
    seen = len(learner.epochs_of(HOPELESS))
    learner.visit(40)
    later = learner.epochs_of(HOPELESS)[seen:]
    assert later == list(range(later[0], later[0] + len(later)))


def test_an_epoch_in_which_all_would_rest_visits_all(open_buffer):
    buffer = open_buffer(5, max_rest=10**6)
    learner = Learner(buffer, lambda prompt: (1.0, 1.0)).visit(15)
    assert [epoch for epoch, _ in learner.visits] == [0] * 5 + [1] * 5 + [2] * 5
    assert buffer.store.num_skipped() == 0


def test_an_epoch_is_decided_when_it_begins(open_buffer):
    """Who comes to rest in its course is still visited in it, also after a crash."""
    rewards = {prompt: (0.0, 1.0) for prompt in range(4)}
    buffer = open_buffer(4, max_rest=4, staleness=1)
    learner = Learner(buffer, rewards.get).visit(3)
    (late,) = buffer.lease(most=1)  # the last of epoch 0
    learner.visit(1)  # the first of epoch 1
    for index in range(2):
        buffer.put(late, index, 1.0)
    buffer.crash()
    learner.visit(3)
    assert {prompt for epoch, prompt in learner.visits if epoch == 1} == {0, 1, 2, 3}


def test_the_order_is_the_seeds_with_the_resting_left_out(open_buffer):
    def rewards(prompt):
        return (1.0, 1.0) if prompt < 4 else (0.0, 1.0)

    full = Learner(open_buffer(8, max_rest=0), rewards).visit(16).visits
    first, second = (Learner(open_buffer(8, max_rest=8), rewards).visit(12).visits for _ in range(2))
    assert first == second == full[:8] + [(1, prompt) for _, prompt in full[8:] if prompt >= 4]


def test_crashes_change_neither_order_nor_counts(open_buffer):
    undisturbed = Learner(open_buffer(3, max_rest=4), by_kind).visit(30)
    buffer = open_buffer(3, max_rest=4)
    learner = Learner(buffer, by_kind)
    for _ in range(30):
        learner.visit(1)
        buffer.crash()
    assert learner.visits == undisturbed.visits
    skipped = buffer.store.num_skipped()
    assert skipped == undisturbed.buffer.store.num_skipped() > 10
    assert buffer.broker.audit() == []


def test_what_was_passed_over_is_reported_and_held_to_account(open_buffer):
    buffer = open_buffer(3, max_rest=4)
    Learner(buffer, by_kind).visit(20)
    buffer.broker.report({})
    metrics = buffer.status().reports[-1][-1]
    assert metrics["buffer/skipped_by_curriculum"] == buffer.store.num_skipped()
    assert metrics["buffer/resting_prompts"] == 2
    buffer.store.begin()
    buffer.store.add_skips(1000, [0])
    buffer.store.commit()
    assert "skipped by the curriculum" in buffer.broker.audit()[0]


def test_too_few_scored_members_are_no_verdict(open_buffer):
    learner = Learner(open_buffer(1, max_rest=8), lambda prompt: (1.0, None))
    assert learner.visit(3).epochs_of(0) == [0, 1, 2]


def test_what_is_trained_although_its_rewards_are_equal_rests_too(open_buffer):
    learner = Learner(open_buffer(3, max_rest=4, drop_zero_variance=False), by_kind).visit(20)
    assert learner.epochs_of(SOLVED)[:3] == [0, 2, 5]


def test_in_a_mixture_it_is_the_row_that_rests_not_the_prompts_number(open_buffer):
    """Task 0 has 2 rows and 1 prompt an epoch, so that its rows take turns; row 0 is solved."""
    shares = (Share(1, 2), Share(1, 1))
    buffer = open_buffer(2, max_rest=1, shares=shares)
    learner = Learner(buffer, lambda prompt: (0.0, 1.0))

    def rewards(prompt):
        epoch = learner.visits[-1][0]
        return (1.0, 1.0) if locate(shares, prompt, epoch)[:2] == (0, 0) else (0.0, 1.0)

    learner.rewards = rewards
    learner.visit(20)
    rows = [locate(shares, prompt, epoch) for epoch, prompt in learner.visits]
    visits = {key: [p.visit for p in rows if p[:2] == key] for key in ((0, 0), (0, 1), (1, 0))}
    assert visits[0, 0][:3] == [0, 2, 4]
    assert visits[0, 1][:4] == [0, 1, 2, 3] and visits[1, 0][:4] == [0, 1, 2, 3]


def test_a_place_is_the_tasks_row_and_how_often_it_was_visited():
    shares = (Share(3, 2), Share(1, 5))
    assert [tuple(locate(shares, 2, epoch)) for epoch in range(3)] == [(0, 0, 1), (0, 1, 2), (0, 0, 4)]
    assert locate(shares, 3, 7) == Place(1, 2, 1)
