import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.limiter import Limits, Outstanding, capacity, fair_share, version_at

LIMITS = st.builds(Limits, st.integers(0, 4), st.integers(1, 16), st.integers(1, 4), st.just(10**6))


def test_at_the_start_the_staleness_window_may_be_filled():
    assert capacity(Limits(1, 8, 1, 100), Outstanding(0, 0, 0, 0), 0) == 16


def test_on_policy_leases_one_version_at_a_time():
    limits = Limits(0, 8, 1, 100)
    assert capacity(limits, Outstanding(0, 0, 0, 0), 0) == 8
    assert capacity(limits, Outstanding(running=3, ready=5, bound=0, unpublished=0), 0) == 0
    assert capacity(limits, Outstanding(running=0, ready=0, bound=8, unpublished=0), 0) == 0
    assert capacity(limits, Outstanding(running=0, ready=0, bound=0, unpublished=0), 1) == 8


def test_what_no_step_is_left_to_train_is_not_leased():
    assert capacity(Limits(4, 8, 1, 10), Outstanding(running=3, ready=0, bound=0, unpublished=0), 9) == 5


def test_a_lower_limit_on_resume_waits_until_the_surplus_is_trained():
    assert capacity(Limits(0, 4, 1, 100), Outstanding(running=9, ready=2, bound=0, unpublished=0), 3) == 0


@given(
    LIMITS, st.integers(0, 50), st.integers(0, 3), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)
)
def test_it_equals_the_rule_counted_since_version_0(limits, version, extra_steps, running, ready, bound):
    steps_since_publish = min(extra_steps, limits.publish_every - 1)
    step = version * limits.publish_every + steps_since_publish
    trained = step * limits.groups_per_batch
    accepted = trained + ready + bound
    per_version = limits.groups_per_batch * limits.publish_every
    by_history = (limits.max_staleness + version + 1) * per_version - (accepted + running)
    outstanding = Outstanding(running, ready, bound, steps_since_publish * limits.groups_per_batch)
    assert capacity(limits, outstanding, step) == max(0, by_history)


@given(LIMITS, st.data())
def test_a_group_trained_in_turn_is_never_older_than_the_limit(limits, data):
    """Lease greedily at random moments, to engines that lag, and train oldest first; each batch is young
    enough when it is trained."""
    version, step, unpublished, queue = 0, 0, 0, []
    for _ in range(data.draw(st.integers(5, 40))):
        lag = data.draw(st.integers(0, min(version, limits.max_staleness)))
        room = capacity(limits, Outstanding(len(queue), 0, 0, unpublished), step, lag)
        queue += [version - lag] * data.draw(st.integers(0, room))
        if len(queue) >= limits.groups_per_batch:
            batch, queue = queue[: limits.groups_per_batch], queue[limits.groups_per_batch :]
            assert version - min(batch) <= limits.max_staleness
            step += 1
            unpublished += limits.groups_per_batch
            if step % limits.publish_every == 0:
                version, unpublished = version + 1, 0


@given(LIMITS, st.integers(1, 200))
def test_it_always_makes_progress(limits, steps):
    """When nothing is on its way, at least one batch may be leased, at any step."""
    for step in range(steps):
        unpublished = step % limits.publish_every * limits.groups_per_batch
        assert capacity(limits, Outstanding(0, 0, 0, unpublished), step) >= limits.groups_per_batch


@pytest.mark.parametrize("actors, share", [(1, 16), (3, 6), (100, 1), (0, 16)])
def test_shares_cover_the_window(actors, share):
    assert fair_share(Limits(1, 8, 1, 100), actors) == share


@pytest.mark.parametrize("step, version", [(5, 2), (6, 2), (7, 3), (9, 4)])
def test_a_prefetched_step_counts_the_versions_before_it(step, version):
    assert version_at(Limits(1, 8, 2, 100), step, committed_step=4, version=2) == version
