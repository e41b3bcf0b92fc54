"""When an actor leases nothing because a tool is down, and how it finds out that it is back."""

from __future__ import annotations

import asyncio

from actors.tool_pause import PROBE_EVERY_S, ToolPause
from tests.fakes import FakeClock


class FakeTools:
    def __init__(self) -> None:
        self.gone: dict[str, str] = {}
        self.answers = True  # what a probe says
        self.probes = 0

    def down(self) -> dict[str, str]:
        return self.gone

    async def probe(self) -> bool:
        self.probes += 1
        return self.answers


def allowed(pause: ToolPause, free: int = 4) -> int:
    return asyncio.run(pause.allowed(free))


def test_nothing_is_leased_while_a_tool_is_down_and_all_is_once_it_answers():
    tools, clock = FakeTools(), FakeClock()
    pause = ToolPause(tools, clock)
    assert allowed(pause) == 4 and pause.reason == "" and pause.take_paused_s() == 0
    tools.gone, tools.answers = {"search": "search is unavailable (refused)"}, False
    assert allowed(pause) == 0 and pause.reason == "search is unavailable (refused)"
    clock.now += PROBE_EVERY_S
    assert allowed(pause) == 0 and tools.probes == 1
    assert allowed(pause) == 0 and tools.probes == 1  # not before the time is up again
    assert pause.take_paused_s() == PROBE_EVERY_S and pause.take_paused_s() == 0
    tools.gone = {}
    assert allowed(pause) == 4 and pause.reason == ""


def test_where_only_a_call_can_show_it_one_group_is_leased_now_and_then():
    tools, clock = FakeTools(), FakeClock()
    pause = ToolPause(tools, clock)
    tools.gone = {"search": "gone"}
    grants = []
    for _ in range(7):
        grants.append(allowed(pause))
        clock.now += PROBE_EVERY_S / 2
    assert grants == [0, 0, 1, 0, 1, 0, 1]
    assert allowed(pause, free=0) == 0
