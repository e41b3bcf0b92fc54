"""Running code in boxes: what comes back, the limits, sessions, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolcall.sandbox import Ended, Limits, Sandbox, SandboxUnavailable
from toolcall.sandbox.mends import mend

ROOT = Path(__file__).parents[3]
SMALL = Limits(wall_s=60, cpu_s=10, memory_mb=128, disk_mb=8, processes=8, output_bytes=10_000)


def in_sandbox(body: Callable[[Sandbox], Coroutine[Any, Any, Any]], limits: Limits = SMALL) -> Any:
    """What `body` returns in a sandbox. Skips the test where the machine has none."""

    async def main() -> Any:
        sandbox = Sandbox(limits)
        try:
            await sandbox.start()
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        async with sandbox:
            return await body(sandbox)

    return asyncio.run(main())


def test_output_exit_code_stdin_and_files_come_through():
    async def body(sandbox):
        code = (
            "import sys; print(input(), open('data/x.txt').read()); print('no', file=sys.stderr); sys.exit(3)"
        )
        return await sandbox.run(code, stdin="in\n", files={"data/x.txt": "file"})

    result = in_sandbox(body)
    assert (result.ended, result.exit_code, result.stdout) == (Ended.EXITED, 3, "in file\n")
    assert result.stderr == "no\n"
    assert not result.ok


def test_an_exception_is_a_traceback_of_the_code_alone():
    result = in_sandbox(lambda sandbox: sandbox.run("def f():\n    return 1 / 0\n\nf()"))
    assert result.exit_code == 1
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "<code>", line 4, in <module>'
    )
    assert "return 1 / 0" in result.stderr and "worker.py" not in result.stderr


def test_a_script_ends_as_a_script_does():
    code = (
        "import atexit, threading\n"
        "said = threading.Event()\n"
        "atexit.register(lambda: print('exit function'))\n"
        "threading.Thread(target=lambda: (said.wait(), print('thread'))).start()\n"
        "print('main', __name__)\n"
        "said.set()\n"
    )
    result = in_sandbox(lambda sandbox: sandbox.run(code))
    assert result.stdout == "main __main__\nthread\nexit function\n"


def test_echo_prints_the_value_of_the_last_expression():
    async def body(sandbox):
        return [
            (await sandbox.run(code, echo=True)).stdout for code in ("1 + 1", "x = 1", "None", "print(3)")
        ]

    assert in_sandbox(body) == ["2\n", "", "", "3\n"]


@pytest.mark.parametrize(
    ("code", "limits", "ended"),
    [
        ("while True: pass", {"cpu_s": 0.1}, Ended.CPU),
        ("import time\ntime.sleep(600)", {"wall_s": 0.3}, Ended.TIMEOUT),
        ("while True: print('x' * 1000)", {"output_bytes": 9_000}, Ended.OUTPUT),
        ("import os\nos.kill(os.getpid(), 11)", {}, Ended.SIGNALLED),
    ],
)
def test_who_ended_a_run_is_told_with_the_output_before_it(code, limits, ended):
    result = in_sandbox(lambda sandbox: sandbox.run("print('a')\n" + code, limits=replace(SMALL, **limits)))
    assert result.ended is ended
    assert len(result.stdout) <= 10_000
    assert result.stdout.startswith("a\n") or ended is Ended.TIMEOUT  # a starved machine may print nothing


def test_boxes_made_ahead_are_for_runs_with_the_same_limits():
    async def body(sandbox):
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        limits = [None, replace(SMALL, open_files=77), None]
        return [(await sandbox.run(code, limits=each)).stdout for each in limits]

    assert in_sandbox(body) == ["128\n", "77\n", "128\n"]


def test_a_box_that_cannot_be_made_is_no_failure_of_the_code():
    async def body(sandbox):
        too_large = replace(SMALL, memory_mb=1 << 50)
        with pytest.raises(SandboxUnavailable, match="no box could be made: OverflowError"):
            await sandbox.run("", limits=too_large)
        return (await sandbox.run("print('next')")).stdout

    assert in_sandbox(body) == "next\n"


def test_memory_beyond_the_limit_is_a_memory_error():
    result = in_sandbox(lambda sandbox: sandbox.run("x = bytearray(400 << 20)"))
    assert "MemoryError" in result.stderr


def test_no_state_passes_from_one_run_to_the_next():
    async def body(sandbox):
        await sandbox.run("import math; math.pi = 3; leak = 1; open('/tmp/leak', 'w').write('x')")
        return await sandbox.run(
            "import math, os; print(math.pi > 3, 'leak' in globals(), os.listdir('/tmp'))"
        )

    assert in_sandbox(body).stdout == "True False []\n"


def test_a_session_keeps_variables_and_files_of_its_own():
    async def body(sandbox):
        async with sandbox.session() as one, sandbox.session() as two:
            await one.run("x = 1; open('f', 'w').write('one')")
            await two.run("x = 2; open('f', 'w').write('two')")
            code = "print(x, open('f').read())"
            return (await one.run(code)).stdout, (await two.run(code)).stdout

    assert in_sandbox(body) == ("1 one\n", "2 two\n")


def test_a_session_survives_exceptions_and_sys_exit_but_not_a_broken_limit():
    async def body(sandbox):
        async with sandbox.session(limits=replace(SMALL, cpu_s=0.2)) as session:
            codes = [(await session.run(code)).exit_code for code in ("x = 5", "1/0", "raise SystemExit(4)")]
            kept = (await session.run("x", echo=True)).stdout
            ended = (await session.run("while True: pass")).ended
            with pytest.raises(SandboxUnavailable, match="has ended"):
                await session.run("x")
            return codes, kept, ended

    assert in_sandbox(body) == ([0, 1, 4], "5\n", Ended.CPU)


def test_a_run_that_is_cancelled_leaves_no_process(tmp_path):
    async def body(sandbox):
        async with sandbox.session() as session:
            task = asyncio.create_task(session.run("import time\nwhile True: time.sleep(1)"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert not session.alive
        return (await sandbox.run("print('next')")).stdout

    assert in_sandbox(body) == "next\n"


def test_runs_that_end_at_once_are_not_missed():
    async def body(sandbox):
        return {(await sandbox.run("")).ended for _ in range(20)}

    assert in_sandbox(body) == {Ended.EXITED}


@pytest.mark.parametrize(
    ("code", "ended", "exit_code"),
    [
        ("import os; os._exit(7)", Ended.EXITED, 7),
        ("import os; os.kill(os.getpid(), 11)", Ended.SIGNALLED, -11),
        ("import os; os.closerange(3, 99); os._exit(7)", Ended.EXITED, 7),
    ],
)
def test_code_that_ends_its_session_is_no_failure_of_the_sandbox(code, ended, exit_code):
    """Else code could turn a bad answer into one that is not scored."""

    async def body(sandbox):
        async with sandbox.session() as session:
            result = await session.run(code)
            return result.ended, result.exit_code, session.alive

    assert in_sandbox(body) == (ended, exit_code, False)


def test_a_fork_server_that_died_is_replaced_at_the_next_run():
    async def body(sandbox):
        assert sandbox._server is not None
        sandbox._server._process.kill()
        await asyncio.to_thread(sandbox._server._process.wait, 60)
        return (await sandbox.run("print('next')")).stdout

    assert in_sandbox(body) == "next\n"


REFUSED = "[Errno 1] unshare: Operation not permitted"


@pytest.mark.parametrize(
    ("files", "refusal", "says"),
    [
        ({".dockerenv": ""}, REFUSED, "; since this is a container, start it with --security-opt seccomp="),
        (
            {"proc/sys/user/max_user_namespaces": "0\n", ".dockerenv": ""},
            REFUSED,
            "max_user_namespaces=10000",
        ),
        ({"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"}, REFUSED, "_userns=0"),
        ({"proc/sys/kernel/unprivileged_userns_clone": "0\n"}, REFUSED, "userns_clone=1"),
        ({}, "[Errno 1] mount of /proc: Operation not permitted", "; if this is a container"),
    ],
)
def test_a_refusal_of_the_kernel_says_how_to_mend_it(tmp_path, files, refusal, says):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert says in mend(refusal, tmp_path)


def test_a_refusal_that_is_not_the_kernels_needs_no_other_mend(tmp_path):
    assert (
        mend("libseccomp.so.2 is not installed (Debian and Ubuntu: apt install libseccomp2)", tmp_path) == ""
    )


ALMOST_NO_NAMESPACES = """
import asyncio
from pathlib import Path
from toolcall.tools.python import python_tool

Path("/proc/sys/user/max_user_namespaces").write_text("0")  # of this process's user namespace alone
try:
    asyncio.run(python_tool().prepare())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_machine_that_gives_no_namespaces_is_refused_with_the_mend_and_the_unsafe_way():
    command = ["unshare", "--user", "--map-user=1000", "--keep-caps", sys.executable]
    done = subprocess.run(
        [*command, "-c", ALMOST_NO_NAMESPACES], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("ToolUnavailable ") and "No space left on device" in done.stdout, done
    assert "as root: sysctl user.max_user_namespaces=10000; see docs/security.md" in done.stdout
    assert "unsafe_no_sandbox = true" in done.stdout
