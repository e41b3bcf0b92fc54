"""Reading one trajectory back from a store that its server still writes."""

import pytest

from buffer.messages import PutTrajectory
from buffer.reader import NoSuchTrajectory, read_trajectory
from tests.unit.buffer.support import Buffer, config, member, same


@pytest.fixture
def stored(tmp_path):
    """A buffer that has one member of a group, and that member."""
    buffer = Buffer(tmp_path / "buffer.sqlite", config(group_size=3))
    (lease,) = buffer.lease(most=1)
    put = member(lease, 1, reward=1.0)
    buffer(PutTrajectory(put))
    yield buffer, put
    buffer.close()


def test_a_trajectory_is_read_by_its_id(stored):
    buffer, put = stored
    assert same(read_trajectory(buffer.path, put.trajectory_id), put)


def test_an_unknown_id_is_named(stored):
    buffer, _ = stored
    with pytest.raises(NoSuchTrajectory, match="holds no trajectory 'g/9'"):
        read_trajectory(buffer.path, "g/9")


def test_a_missing_store_is_named(tmp_path):
    with pytest.raises(NoSuchTrajectory, match=r"buffer\.sqlite does not exist"):
        read_trajectory(tmp_path / "buffer.sqlite")
