"""What the timeline reads out of a run's reports."""

import pytest

pytest.importorskip("matplotlib")

from benchmarks.timeline import Step, Swap, in_flight, read_steps, read_swaps
from metrics import names


def report(role: str, time: float, **metrics: float) -> dict:
    return {"role": role, "name": f"{role}-0", "time": time, "metrics": metrics}


def swapped(at: float, version: int) -> dict[str, float]:
    return {
        names.SYNC_SWAPPED_AT: at,
        names.SYNC_PAUSE_S: 0.5,
        names.SYNC_TRANSFER_S: 2.0,
        names.SYNC_VERSION: version,
    }


def test_each_swap_is_one_although_reports_repeat_the_last():
    reports = [
        report("actor", 11.0),
        report("actor", 13.0, **swapped(12.0, 1)),
        report("actor", 15.0, **swapped(12.0, 1)),
        report("actor", 23.0, **swapped(22.0, 3)),
        report("learner", 23.0, **swapped(22.0, 3)),
    ]
    assert read_swaps(reports) == {
        "actor-0": [Swap((9.5, 11.5), (11.5, 12.0), 1), Swap((19.5, 21.5), (21.5, 22.0), 3)]
    }


def test_the_parts_of_a_step_end_with_its_report():
    parts = {names.STEP: 7, names.WAIT_S: 4.0, names.TRAIN_S: 2.0, names.PUBLISH_S: 0.5}
    reports = [report("learner", 100.0, **parts), report("learner", 101.0, **{names.STEP: 7})]
    assert read_steps(reports) == [Step(7, (93.5, 97.5), (97.5, 99.5), (99.5, 100.0))]


def test_open_spans_are_counted_at_every_change():
    assert in_flight([(0, 4), (1, 2), (2, 3)]) == ([0, 1, 2, 2, 3, 4], [1, 2, 1, 2, 1, 0])
