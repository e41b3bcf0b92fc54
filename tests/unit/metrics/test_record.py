"""Windows of counters and gauges."""

from concurrent.futures import ThreadPoolExecutor

from metrics.record import Recorder
from tests.fakes import FakeClock


def test_counters_start_again_and_gauges_stay():
    recorder = Recorder()
    recorder.add("a", 2)
    recorder.add("a")
    recorder.set("g", 7)
    assert recorder.take() == {"a": 3, "g": 7}
    assert recorder.take() == {"g": 7}


def test_the_window_knows_its_length():
    clock = FakeClock()
    recorder = Recorder("window_s", clock)
    clock.now += 5
    assert recorder.take() == {"window_s": 5}
    clock.now += 2
    assert recorder.take() == {"window_s": 2}


def test_nothing_is_lost_or_counted_twice_between_threads():
    recorder = Recorder()

    def work(_):
        for _ in range(2000):
            recorder.add("n")
        return recorder.take().get("n", 0)

    with ThreadPoolExecutor(4) as pool:
        taken = sum(pool.map(work, range(4)))
    assert taken + recorder.take().get("n", 0) == 8000
