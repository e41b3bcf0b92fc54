"""Ctrl-C and SIGTERM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.interrupts import Interrupts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.requested
        os.kill(os.getpid(), number)
        assert interrupts.requested
    assert signal.getsignal(number) is before


def test_handlers_are_taken_again_after_a_library_took_them():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal\n"
        "from launcher.interrupts import Interrupts\n"
        "with Interrupts():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('never', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stdout == "still here\n"
