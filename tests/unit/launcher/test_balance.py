import io

import pytest
from rich.console import Console

from launcher.balance import Balance
from launcher.progress import picture
from metrics import names
from tests.unit.launcher.test_progress import ACTOR, learner, status, view


@pytest.mark.parametrize(
    "actors, learners, actors_busy, learner_busy, words",
    [
        (1, 1, 1.0, 0.4, "the actors are the bottleneck; 2.5 actors per learner would balance (now 1)"),
        (4, 2, 0.5, 1.0, "the learner is the bottleneck; 1.0 actors per learner would balance (now 2)"),
        (2, 1, 0.95, 0.97, "actors and learner are both busy"),
        (1, 1, 1.0, 0.0, "the actors are the bottleneck; 100.0 actors per learner would balance (now 1)"),
    ],
)
def test_the_side_that_is_busy_is_the_bottleneck(actors, learners, actors_busy, learner_busy, words):
    assert Balance(actors, learners, actors_busy, learner_busy, False).advice == words


def test_on_policy_runs_take_turns():
    balance = Balance(1, 1, 0.5, 0.5, True)
    assert balance.words == (
        "actors and learner take turns: max_staleness = 0: learner waits 50%, actors idle 50%"
    )


def test_it_comes_from_the_latest_steps_and_reports_and_not_from_the_start_up():
    run = view()
    steps = [("learner", "learner-0", 90.0 + i, learner(i, **{names.WAIT_S: 12.0})) for i in (2, 3, 4)]
    first = ("learner", "learner-0", 90.0, learner(1, **{names.WAIT_S: 20.0}))
    run.take(status(3, first, *steps[:2], ("actor", "actor-0", 99.0, ACTOR)), 100.0)
    assert run.balance is None
    run.take(status(4, steps[2]), 100.0)
    assert run.balance is not None
    assert run.balance.learner_busy == pytest.approx(0.4) and run.balance.actors_busy == pytest.approx(0.9)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(picture(run))
    assert "the actors are the bottleneck; 2.2 actors per learner" in console.export_text()
