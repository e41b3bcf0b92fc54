"""The picture and its numbers, from reports as the roles send them."""

import io

import pytest
from rich.console import Console

from buffer.messages import RoleStatus, StatusReply
from configs.schema import RunConfig
from launcher.progress import before_after, curve, duration, picture, plain_line
from launcher.run_view import RECENT_S, RunView
from metrics import names

LEDGER = {
    "leased": 40,
    "trained": 20,
    "ready": 3,
    "running": 9,
    "dropped_stale": 0,
    "dropped_zero_variance": 8,
}
ACTOR = {
    names.ACTOR_TRAJECTORIES: 20,
    names.ACTOR_SUCCESS: 9,
    names.ACTOR_TOKENS: 600,
    names.ACTOR_WINDOW_S: 2.0,
    names.ACTOR_IN_FLIGHT: 48,
    names.ACTOR_IDLE_S: 0.2,
    names.ACTOR_PAUSED_S: 0.1,
    names.TOOL_CALLS: 40,
    names.TOOL_FAILURES: 2,
    names.TOOL_SECONDS: 0.1,
}


def learner(step, **changed):
    return {
        names.STEP: step,
        names.REWARD_MEAN: 0.4,
        names.STEP_S: 20.0,
        names.WAIT_S: 5.0,
        names.TRAIN_S: 14.0,
        names.TOKENS_PACKED: 7000,
        names.LOSS: -0.0123,
        names.GRAD_NORM: 0.81,
        names.STALENESS_MEAN: 0.8,
        names.STALENESS_MAX: 2,
        names.CLIP_FRACTION: 0.03,
    } | changed


def status(step, *reports):
    numbered = tuple((i + 1, *report) for i, report in enumerate(reports))
    roles = (RoleStatus("actor", "actor-0", "running", step, 3, 0.1),)
    return StatusReply("r", step, step, roles, LEDGER, True, numbered)


def view(**sections):
    return RunView.of(RunConfig.model_validate({"learner": {"steps": 60}} | sections), "my-run")


def text(renderable):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_rates_are_of_all_actors_and_shares_of_their_time():
    run = view()
    run.take(
        status(
            0,
            ("actor", "actor-0", 99.0, ACTOR),
            ("actor", "actor-1", 99.0, ACTOR | {names.ACTOR_TOKENS: 200}),
        ),
        100.0,
    )
    assert run.actor_tokens_per_s == 300 + 100
    assert run.in_flight == 96
    assert run.success == pytest.approx(18 / 40)
    assert run.actor_share(names.ACTOR_IDLE_S) == pytest.approx(0.1)
    assert run.tool_seconds == pytest.approx(0.0025) and run.tool_failures == pytest.approx(0.05)


def test_old_reports_leave_the_rates():
    run = view()
    run.take(status(0, ("actor", "actor-0", 100.0, ACTOR)), 100.0)
    run.take(status(0), 101.0 + RECENT_S)
    assert run.actor_tokens_per_s is None and run.success is None


def test_slow_steps_keep_the_reports_of_the_last_two():
    run = view()
    slow = learner(1, **{names.STEP_S: 2 * RECENT_S})
    run.take(status(1, ("learner", "learner-0", 100.0, slow), ("actor", "actor-0", 100.0, ACTOR)), 100.0)
    run.take(status(1), 100.0 + 3 * RECENT_S)
    assert run.success == pytest.approx(9 / 20)
    run.take(status(1), 101.0 + 4 * RECENT_S)
    assert run.success is None


def test_steps_give_curve_rate_and_time_left():
    run = view()
    rows = run.take(
        status(2, ("learner", "learner-0", 90.0, learner(1)), ("learner", "learner-0", 99.0, learner(2))),
        100.0,
    )
    assert [row.step for row in rows] == [1, 2]
    assert run.seconds_left == 58 * 20.0
    assert run.learner_tokens_per_s == 500 and run.learner_wait == 0.25
    assert run.elapsed_s == 10.0


def test_a_step_done_again_after_a_restart_replaces_its_row():
    run = view()
    run.take(status(1, ("learner", "learner-0", 90.0, learner(1))), 91.0)
    run.take(status(1, ("learner", "learner-0", 95.0, learner(1, **{names.REWARD_MEAN: 0.9}))), 96.0)
    assert len(run.rows) == 1 and run.last.reward == 0.9


def test_the_picture_shows_every_part_of_the_run():
    run = view()
    run.take(status(2, ("actor", "actor-0", 99.0, ACTOR), ("learner", "learner-0", 99.0, learner(2))), 100.0)
    run.last_event = "17:20:01 actor-0 died [/INST]"
    shown = text(picture(run))
    for words in (
        "my-run",
        "2/60",
        "about 19 min 20 s left",
        "0.400",
        "45%",
        "300 tok/s, 48 in flight, idle 10%, paused 5%",
        "500 tok/s, waits 25%, loss -0.0123, grad 0.81, clipped 3%",
        "0.80 mean, 2 max, weights v2",
        "2.5 ms a call, 5% failed, 40 calls in the last minute",
        "3 of 8 groups ready, 9 running, dropped 8 zero_variance",
        "17:20:01 actor-0 died [/INST]",
    ):
        assert words in shown, words


def test_the_picture_keeps_its_height():
    run = view()
    heights = {len(text(picture(run)).splitlines())}
    run.take(status(0), 100.0)
    heights.add(len(text(picture(run)).splitlines()))
    run.take(status(2, ("actor", "actor-0", 99.0, ACTOR), ("learner", "learner-0", 99.0, learner(2))), 100.0)
    run.last_event = "a long event " * 30
    heights.add(len(text(picture(run)).splitlines()))
    assert len(heights) == 1


def test_a_plain_line_says_the_step_alone():
    run = view()
    reports = (("actor", "actor-0", 99.0, ACTOR), ("learner", "learner-0", 99.0, learner(2)))
    (row,) = run.take(status(2, *reports), 100.0)
    line = plain_line(run, row)
    assert line.startswith("step 2/60  reward 0.400  success 45%  loss -0.0123")
    assert "\n" not in line and "v2" in line and "left 19 min 20 s" in line


def test_curves():
    assert curve([]) == ""
    assert curve([1.0, 1.0]) == "▁▁"
    assert curve([0, 1, 2, 3]) == "▁▃▆█"
    assert len(curve(list(range(1000)), width=32)) == 32


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "?"), (42, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_before_and_after_stand_side_by_side():
    before = {"success": 0.28, "low": 0.23, "high": 0.34, "n": 256}
    after = {"success": 0.9, "low": 0.86, "high": 0.93, "n": 256}
    shown = text(before_after({"greedy": before, "sampled": before}, {"greedy": after, "sampled": after}))
    assert "28.0% (23.0% – 34.0%)" in shown and "90.0% (86.0% – 93.0%)" in shown and "256" in shown


def test_r3_many_unscored_trajectories_are_said_loudly():
    for errors, loud in ((1, False), (10, True)):
        run = view()
        actor = ACTOR | {names.ACTOR_ERRORS: errors}
        run.take(
            status(1, ("actor", "actor-0", 99.0, actor), ("learner", "learner-0", 99.0, learner(1))), 100.0
        )
        shown = (text(picture(run)), plain_line(run, run.rows[1]))
        assert ["50% UNSCORED, why: logs/actor-*.log" in where for where in shown] == [loud, loud]


def test_a_run_that_evaluates_shows_the_latest_and_the_curve_of_all():
    config = RunConfig.model_validate({"eval": {"every_steps": 5}})
    shown = RunView.of(config, "x")
    assert "0 prompts running" in text(picture(shown))
    reports = tuple(
        (n, "eval", "eval", 1.0, {names.EVAL_VERSION: 5 * n, names.EVAL_SUCCESS: 0.2 * n}) for n in (1, 2, 3)
    )
    shown.take(StatusReply("r", 15, 15, (), {}, True, reports), 1.0)
    line = next(line for line in text(picture(shown)).splitlines() if "held out" in line)
    assert "60%" in line and "▁▄█" in line and "v15" in line
    assert "held out" not in text(picture(RunView.of(RunConfig(), "x")))


def test_what_the_curriculum_passed_over_is_shown():
    shown = RunView.of(RunConfig(), "x")
    report = (1, "buffer", "buffer", 1.0, {names.BUFFER_SKIPPED: 12.0})
    shown.take(StatusReply("r", 1, 1, (), {"ready": 1}, True, (report,)), 1.0)
    assert "12 skipped by curriculum" in text(picture(shown))
