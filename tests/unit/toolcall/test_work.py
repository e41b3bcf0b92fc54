"""Work that does not end when it should, at the end of the process."""

import subprocess
import sys

import pytest

DEAF = """
import asyncio
from toolcall.work import DeadlineExceeded, finish, run, start

async def deaf():
    while True:
        try:
            return await asyncio.Event().wait()
        except BaseException:  # a retry that means too well
            await asyncio.sleep(0.01)

async def main():
    try:
        await finish(start(deaf, is_async=True), 0.01)
    except DeadlineExceeded:
        print("left behind", flush=True)
    {then}

run(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [("pass", 0, "left behind\nended\n"), ("raise SystemExit(3)", 3, "left behind\n")],
)
def test_m6_a_call_that_swallows_its_cancellation_does_not_keep_the_process(then, code, said):
    script = [sys.executable, "-c", DEAF.format(then=then)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, said)
