"""The publisher's decisions, on a clock that the test holds."""

import pytest

from weightsync.coordinator import (
    MAX_FAILURES,
    PROBE_S,
    STRAGGLER_S,
    Action,
    CloseGroup,
    Coordinator,
    Send,
    Settings,
    StartSending,
)
from weightsync.wire import (
    Abort,
    Alive,
    Begin,
    Commit,
    Dropped,
    Failed,
    Join,
    Leave,
    Loaded,
    Refused,
    Welcome,
)

SOURCE = "run/ab"
TIMEOUT_S, SILENCE_S = 100.0, 10.0


class Scene:
    """A coordinator, its clock, and what the last event made it do."""

    def __init__(self, backend: str = "gloo", device: str = "cpu") -> None:
        self.now = 0.0
        self.coordinator = Coordinator(
            Settings(
                SOURCE,
                (("w", "float32", (1,)),),
                1,
                backend,
                device,
                "host",
                1,
                TIMEOUT_S,
                SILENCE_S,
            )
        )
        self.actions: list[Action] = []

    def join(self, name: str, *, source: str = "", version: int = 0, devices=("cpu",)) -> None:
        self.says(name, Join(name, devices, source, version))

    def says(self, name: str, message) -> None:
        self.actions = self.coordinator.on_message(name.encode(), message, self.now)

    def publish(self, version: int) -> None:
        self.actions = self.coordinator.on_published(version, self.now)

    def sent(self, number: int, version: int) -> None:
        self.actions = self.coordinator.on_sent(number, version, 77, self.now)

    def tick_at(self, now: float, alive: tuple[str, ...] = ()) -> None:
        self.now = now
        for name in alive:
            self.says(name, Alive())
        self.actions = self.coordinator.tick(now)

    def to(self, name: str, kind: type) -> list:
        return [
            a.message
            for a in self.actions
            if isinstance(a, Send) and a.to == name.encode() and isinstance(a.message, kind)
        ]

    def started(self) -> list[StartSending]:
        return [a for a in self.actions if isinstance(a, StartSending)]

    def take(self, *members: str, version: int) -> None:
        """One whole transfer of what was just started."""
        number = self.started()[0].transfer
        self.sent(number, version)
        for member in members:
            self.says(member, Loaded(number, version, 0.1))

    def settle(self, *members: str, version: int = 1) -> None:
        """All members joined and serving `version`."""
        self.publish(version)
        for member in members:
            self.join(member)
            self.take(member, version=version)
        assert self.coordinator.idle


def test_a_join_is_welcomed_and_gets_weights_once_there_are_some():
    scene = Scene()
    scene.join("a")
    assert scene.to("a", Welcome) and not scene.started()
    scene.publish(1)
    (begin,) = scene.to("a", Begin)
    (start,) = scene.started()
    assert (begin.group.rank, start.group.rank, start.group.world) == (1, 0, 2)
    assert not scene.coordinator.idle
    scene.sent(start.transfer, 1)
    assert scene.to("a", Commit) == [Commit(start.transfer, 1, 77)]
    scene.says("a", Loaded(start.transfer, 1, 0.1))
    assert scene.coordinator.idle


def test_settled_members_share_one_broadcast_and_keep_their_group():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (first,) = scene.started()
    assert [scene.to(name, Begin)[0].group.rank for name in "ab"] == [1, 2]
    scene.take("a", "b", version=2)
    scene.publish(3)
    assert scene.started()[0].group == first.group


def test_workers_of_one_engine_take_consecutive_ranks():
    scene = Scene()
    scene.publish(1)
    scene.join("a", devices=("cpu", "cpu"))
    scene.take("a", version=1)
    scene.join("b")
    scene.take("b", version=1)
    scene.publish(2)
    assert [scene.to(name, Begin)[0].group.rank for name in "ab"] == [1, 3]
    assert scene.started()[0].group.world == 4


def test_a_newcomer_is_served_while_a_broadcast_runs():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.join("c")
    (catch_up,) = scene.started()
    assert scene.to("c", Begin) and catch_up.group.name != main.group.name
    assert not scene.to("a", Abort)


def test_a_version_published_meanwhile_waits_for_the_broadcast():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.publish(3)
    assert not scene.started()
    scene.sent(main.transfer, 2)
    scene.says("a", Loaded(main.transfer, 2, 0.1))
    assert not scene.started()  # b still loads; both go on together
    scene.says("b", Loaded(main.transfer, 2, 0.1))
    assert scene.started()[0].group.world == 3


def test_m4_a_silent_member_is_dropped_and_the_others_get_the_version_in_a_new_group():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.tick_at(SILENCE_S - 1, alive=("a",))
    scene.tick_at(SILENCE_S + 1, alive=("a",))
    assert scene.to("b", Dropped) and scene.to("a", Abort)
    assert CloseGroup(main.group.name) in scene.actions
    scene.says("a", Failed(main.transfer, "aborted"))
    (again,) = scene.started()
    assert again.group.world == 2 and again.group.name != main.group.name


def test_m4_only_members_that_owe_an_answer_are_written_to_so_that_a_closed_connection_shows():
    scene = Scene()
    scene.settle("a", "b")
    scene.tick_at(PROBE_S)
    assert scene.actions == []
    scene.publish(2)
    (main,) = scene.started()
    scene.sent(main.transfer, 2)
    scene.says("a", Loaded(main.transfer, 2, 0.1))
    scene.tick_at(2 * PROBE_S)
    assert scene.actions == [Send(b"b", Alive())]
    scene.tick_at(2.5 * PROBE_S)
    assert scene.actions == []


def test_m4_a_member_that_answers_nothing_but_alive_is_dropped_at_the_deadline():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    for now in range(5, int(TIMEOUT_S) + 5, 5):
        scene.tick_at(float(now), alive=("a", "b"))
    assert scene.to("a", Abort) and scene.to("b", Abort)
    scene.says("a", Failed(main.transfer, "aborted"))
    assert not scene.started()  # b may still answer
    scene.tick_at(scene.now + SILENCE_S, alive=("a", "b"))
    assert scene.to("b", Dropped)
    assert scene.started()[0].group.world == 2


def test_m4_a_member_whose_connection_closed_is_not_waited_for():
    scene = Scene()
    scene.settle("a", "b", "c")
    scene.publish(2)
    (main,) = scene.started()
    assert scene.coordinator.is_sending(main.transfer)
    scene.actions = scene.coordinator.on_unreachable(b"b", scene.now)
    assert scene.to("a", Abort) and scene.to("c", Abort)
    assert not scene.coordinator.is_sending(main.transfer)
    scene.says("a", Failed(main.transfer, "aborted"))
    scene.says("c", Failed(main.transfer, "aborted"))
    assert scene.started()[0].group.world == 3
    assert scene.coordinator.on_unreachable(b"b", scene.now) == []


@pytest.mark.parametrize("phase", ["loading", "aborting"])
def test_m4_those_who_answered_go_on_without_one_that_does_not(phase):
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    if phase == "loading":
        scene.sent(main.transfer, 2)
        scene.says("a", Loaded(main.transfer, 2, 0.1))
    else:
        scene.actions = scene.coordinator.on_send_failed(main.transfer, "reset", scene.now)
        scene.says("a", Failed(main.transfer, "aborted"))
    scene.publish(3)
    assert not scene.started()  # b may be only a moment later
    scene.tick_at(STRAGGLER_S, alive=("a", "b"))
    assert scene.to("a", Begin) and not scene.to("b", Begin)
    scene.take("a", version=3)
    scene.says("b", Loaded(main.transfer, 2, 9.0))
    assert scene.to("b", Begin) and not scene.to("a", Begin)
    scene.take("b", version=3)
    scene.publish(4)
    assert scene.started()[0].group.world == 3  # together again


def test_a_failed_broadcast_is_tried_again_with_all_who_answer():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.actions = scene.coordinator.on_send_failed(main.transfer, "connection reset", scene.now)
    assert scene.to("a", Abort) and scene.to("b", Abort)
    scene.says("a", Failed(main.transfer, "aborted"))
    scene.says("b", Failed(main.transfer, "aborted"))
    assert scene.started()[0].group.world == 3


def test_a_swap_that_was_under_way_counts_although_the_transfer_was_aborted():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.actions = scene.coordinator.on_send_failed(main.transfer, "reset", scene.now)
    scene.says("a", Loaded(main.transfer, 2, 0.1))
    scene.says("b", Failed(main.transfer, "aborted"))
    assert scene.to("b", Begin) and not scene.to("a", Begin)


def test_one_members_failure_while_loading_leaves_the_others_alone():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.sent(main.transfer, 2)
    scene.says("a", Failed(main.transfer, "checksum"))
    assert not scene.to("b", Abort)
    scene.says("b", Loaded(main.transfer, 2, 0.1))
    assert scene.to("a", Begin)


def test_a_member_that_keeps_failing_has_to_join_again():
    scene = Scene()
    scene.settle("a")
    scene.publish(2)
    for _ in range(MAX_FAILURES):
        scene.says("a", Failed(scene.started()[0].transfer, "checksum"))
    assert scene.to("a", Dropped) and not scene.started()
    scene.says("a", Alive())
    assert scene.to("a", Dropped)  # reminded until it joins
    scene.join("a")
    assert scene.started()


def test_who_leaves_is_not_waited_for():
    scene = Scene()
    scene.settle("a", "b")
    scene.publish(2)
    (main,) = scene.started()
    scene.says("b", Leave())
    assert scene.to("a", Abort)
    scene.says("a", Failed(main.transfer, "aborted"))
    assert scene.started()[0].group.world == 2
    assert scene.coordinator.take_reports()[1] == []  # leaving is no failure


def test_a_restarted_actor_replaces_its_former_self():
    scene = Scene()
    scene.settle("a")
    scene.actions = scene.coordinator.on_message(b"a-new", Join("a", ("cpu",), "", 0), scene.now)
    assert scene.to("a", Dropped) and scene.to("a-new", Begin)


def test_weights_of_another_learner_run_are_replaced_even_if_the_number_agrees():
    scene = Scene()
    scene.publish(8)
    scene.join("a", source="run/before-the-crash", version=8)
    assert scene.started()
    scene.join("b", source=SOURCE, version=8)  # a reconnect: nothing to send
    assert not scene.started()


@pytest.mark.parametrize(
    ("learner", "engine", "backend"),
    [
        ("cuda:1@m", "cuda:2@m", "nccl"),
        ("cuda:1@m", "cuda:2@n", "nccl"),
        ("cuda:1@m", "cuda:1@m", "gloo"),
        ("cuda:1@m", "cuda:1@container-on-m", "gloo"),
        ("cuda:1@m", "cpu@m", "gloo"),
        ("cpu@m", "cpu@m", "shm"),
        ("cpu@m", "cuda:1@m", "shm"),
        ("cpu@m", "cpu@n", "gloo"),
    ],
)
def test_auto_takes_nccl_for_a_gpu_each_and_shared_memory_around_a_learner_on_a_cpu(learner, engine, backend):
    scene = Scene("auto", learner)
    scene.publish(1)
    scene.join("a", devices=(engine,))
    assert scene.started()[0].group.backend == backend


@pytest.mark.parametrize(
    ("backend", "engine", "says"),
    [
        ("nccl", "cpu@m", 'a has cpu and the learner cuda:1; set it to "auto" or "gloo"'),
        ("nccl", "cuda:1@container-on-m", "a has cuda:1 and the learner cuda:1"),
        ("shm", "cpu@n", "needs every engine on the learner's machine"),
    ],
)
def test_a_backend_that_cannot_reach_the_engine_is_refused_with_the_mend(backend, engine, says):
    scene = Scene(backend, "cuda:1@m")
    scene.join("a", devices=(engine,))
    (refused,) = scene.to("a", Refused)
    assert says in refused.reason and 'set it to "auto" or "gloo"' in refused.reason


def test_another_protocol_is_refused():
    scene = Scene()
    scene.says("a", Join("a", ("cpu",), "", 0, protocol=99))
    assert "install the same release" in scene.to("a", Refused)[0].reason
