"""Looking at a run that is going on, and changing how many actors it has: `launch.py status` and `scale`.

Both talk to the run's buffer alone; what `scale` asks for, the launcher reads there and does.
Called by `launcher.commands`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buffer.messages import StatusReply
from configs.load import load_config
from configs.run_folder import RunFolder
from launcher.buffer_link import BufferLink
from launcher.preflight import PreflightError
from launcher.prepare import existing_folder
from launcher.progress import evaluated
from launcher.run_view import RunView, is_working_actor
from launcher.verdict import in_words

ANSWER_TIMEOUT_S = 30.0
_HEARD_LATELY_S = 10.0
_AFTER_ALL_REPORTS = 2**61  # a report number that no buffer reaches
_LOOK_EVERY_S = 1.0

T = TypeVar("T")


def status(run: Path, console: Console) -> None:
    """Print what the buffer of a run says of it now. Raises PreflightError if it does not run."""
    folder = existing_folder(run)
    with _connected(folder, "status") as buffer:
        reply = _answer(folder, lambda: buffer.status(0))
    view = RunView.of(load_config(folder.config).config, run.name)
    view.take(reply, time.time())
    console.print(
        f"step {reply.step}, weights v{reply.version}, {'finished' if reply.finished else 'running'}",
        highlight=False,
    )
    table = Table("role", "state", "weights", "leases", "last heard")
    for role in reply.roles:
        heard = f"{role.seconds_since_heard:.1f} s ago"
        table.add_row(role.name, escape(role.state), f"v{role.version}", str(role.leases), heard)
    console.print(table)
    balance = "balances" if reply.balanced else "DOES NOT BALANCE"
    console.print(f"ledger {balance}: {in_words(reply.ledger)}", highlight=False)
    if any(view.held_out.values()):
        console.print(f"held-out prompts: {in_words(view.held_out)}", highlight=False)
    for metrics in view.evaluations[-1:]:
        console.print(evaluated(metrics), highlight=False)
    if view.skipped:
        console.print(f"skipped by curriculum: {view.skipped} visits", highlight=False)
    console.print(_rates(view), highlight=False)
    console.print(view.balance.words if view.balance else "no balance of waits yet", highlight=False)


def scale(run: Path, actors: int, console: Console) -> bool:
    """Ask for so many actors and wait until they are there; False if the run could not have them."""
    folder = existing_folder(run)
    deadline = time.monotonic() + load_config(folder.config).config.launch.startup_timeout_s
    working: list[str] = []
    with _connected(folder, "scale") as buffer, console.status(f"scaling to {actors} actors"):
        _answer(folder, lambda: buffer.status(_AFTER_ALL_REPORTS))
        _answer(folder, lambda: buffer.scale(actors) or None)
        while time.monotonic() < deadline:
            reply = _answer(folder, lambda: buffer.status(_AFTER_ALL_REPORTS))
            working = _working(reply)
            if reply.actors_wanted != actors:
                console.print(
                    f"the run goes on with {reply.actors_wanted} actors; the reason is in {folder.events}",
                    highlight=False,
                    soft_wrap=True,
                )
                return False
            if len(working) == actors:
                console.print(f"{actors} actors: {', '.join(working)}", highlight=False)
                return True
            time.sleep(_LOOK_EVERY_S)
    console.print(f"asked for {actors} actors, there are {len(working)} yet; see {folder.events}")
    return False


def _working(reply: StatusReply) -> list[str]:
    return [
        role.name
        for role in reply.roles
        if is_working_actor(role) and role.seconds_since_heard < _HEARD_LATELY_S
    ]


def _rates(view: RunView) -> str:
    actors, learner = view.actor_tokens_per_s, view.learner_tokens_per_s
    sampled = "–" if actors is None else f"{actors:,.0f}"
    trained = "–" if learner is None else f"{learner:,.0f}"
    return f"actors sample {sampled} tok/s, {view.in_flight} in flight; the learner computes {trained} tok/s"


@contextmanager
def _connected(folder: RunFolder, name: str) -> Iterator[BufferLink]:
    endpoint = folder.endpoint.read_text(encoding="utf-8").strip()
    with closing(BufferLink(endpoint, folder.read_keys(), name)) as buffer:
        yield buffer


def _answer(folder: RunFolder, ask: Callable[[], T | None]) -> T:
    """The first answer within ANSWER_TIMEOUT_S. Raises PreflightError."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        answer = ask()
        if answer is not None:
            return answer
    raise PreflightError(
        f"the buffer of {folder.root} does not answer, so the run is not going on; go on with it by "
        f"`python launch.py --resume {folder.root}`"
    )
