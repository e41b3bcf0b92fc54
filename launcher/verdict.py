"""What the ledger says of a run: its words for the screen, and how a run with such an account has ended.

Pure; used by `launcher.supervisor` and `launcher.live`.
"""

from __future__ import annotations

from collections.abc import Mapping

from buffer.messages import StatusReply
from launcher.interfaces import End, Outcome


def in_words(ledger: Mapping[str, int]) -> str:
    """`leased 40 = trained 32 + dropped_stale 8`; what is zero is left out."""
    parts = [f"{name} {count}" for name, count in ledger.items() if name != "leased" and count]
    return f"leased {ledger.get('leased', 0)} = {' + '.join(parts) or 0}"


def imbalance_of(status: StatusReply) -> str:
    """The cause of a failure, with the ids that the buffer found."""
    return f"the ledger does not balance: {'; '.join((_accounts(status), *status.imbalance))}"


def _accounts(status: StatusReply) -> str:
    """The training ledger, and that of evaluations where there were any."""
    accounts = [in_words(status.ledger)]
    if any(status.held_out.values()):
        accounts.append(f"held-out prompts: {in_words(status.held_out)}")
    return "; ".join(accounts)


def verdict(status: StatusReply | None, steps: int) -> Outcome:
    """Of a run whose learner has ended. `status`: the buffer's last word, if it still answered."""
    if status is None:
        return Outcome(End.FAILED, "the buffer does not answer, so the ledger is unknown", "buffer")
    if not status.balanced:
        return Outcome(End.FAILED, imbalance_of(status), "buffer")
    if not status.finished:
        text = f"the learner ended at step {status.step} of {steps}, before the run did"
        return Outcome(End.FAILED, text, "learner-0")
    return Outcome(End.FINISHED, f"{status.step} steps trained; ledger: {_accounts(status)}")
