import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer import arrays
from buffer.arrays import CodecError, Runs

RUNS_OF_INTS, RUNS_OF_BYTES = 4, 5


def there_and_back(array):
    packed = arrays.pack_short(array)
    found = arrays.unpack(packed.code, packed.data)
    return found.expand(len(array)) if isinstance(found, Runs) else found


@given(
    runs=st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 40)), max_size=20),
    dtype=st.sampled_from(["<i4", "u1", "<f4"]),
)
def test_an_array_comes_back_as_it_was(runs, dtype):
    array = np.array([value for value, length in runs for _ in range(length)]).astype("<i4").astype(dtype)
    back = there_and_back(array)
    assert back.dtype == array.dtype and np.array_equal(back, array)


def test_long_runs_are_short_and_short_runs_stay_plain():
    versions = np.repeat(np.array([-1, 4, 5], "<i4"), [200, 900, 900])
    assert len(arrays.pack_short(versions).data) == 3 * 8
    alternating = np.arange(2000, dtype="<i4")
    assert arrays.pack_short(alternating).data == alternating.tobytes()


@pytest.mark.parametrize("lengths", [[4, 3], [4, 5], [8, 0], [9, -1], [2**31 - 1, 2**31 - 1], []])
def test_runs_of_another_length_are_refused_before_they_are_expanded(lengths):
    data = np.array(lengths, "<i4").tobytes() + bytes(len(lengths))
    runs = arrays.unpack(RUNS_OF_BYTES, data)
    assert isinstance(runs, Runs)
    with pytest.raises(CodecError) as refused:
        runs.expand(8)
    assert refused.value.reason == "length"


def test_half_a_run_is_refused():
    packed = msgpack.ExtType(RUNS_OF_INTS, bytes(12))
    with pytest.raises(CodecError, match="no whole number"):
        arrays.unpack(packed.code, packed.data)
