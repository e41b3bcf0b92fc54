"""The sandbox started by an ordinary user and by a root of little power, where the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "toolcall"
CODE = f"""
import sys, types
for name, path in (("toolcall", {str(PACKAGE)!r}), ("toolcall.sandbox", {str(PACKAGE / "sandbox")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
import asyncio
from toolcall.sandbox.client import Sandbox
from toolcall.sandbox.protections import measure
async def main():
    async with Sandbox() as sandbox:
        print(len(await measure(sandbox)), "protections")
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        # Both could make a user namespace, but the kernel holds root to no limit of processes.
        (("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"), "unshare: Operation not"),
        (("unshare", "--user", "--map-user=1000", "--map-group=1000"), "does not hold: limits hold"),
    ],
    ids=lambda each: each[0],
)
def test_root_that_cannot_become_another_user_is_refused(command, says):
    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(f"needs root and {command[0]}")
    as_weak = [*command, sys.executable, "-c", CODE]
    done = subprocess.run(as_weak, capture_output=True, text=True, timeout=120, cwd="/", check=False)
    assert "SandboxUnavailable" in done.stderr and says in done.stderr, done


def test_an_ordinary_user_has_the_same_protections():
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv to become somebody else")
    someone = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
    recent = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):  # root's own interpreter may be closed to others
        # By a shell, as setpriv itself may still start what only root can reach.
        as_someone = [*someone, "/bin/sh", "-c", 'exec "$0" "$@"', python]
        if subprocess.run([*as_someone, "-c", recent], capture_output=True, timeout=60).returncode == 0:
            break
    else:
        pytest.skip("no Python 3.11 that an ordinary user may run")
    if subprocess.run([*someone, "test", "-r", PACKAGE / "sandbox" / "box.py"], timeout=60).returncode:
        pytest.skip("an ordinary user cannot read this repository")
    done = subprocess.run([*as_someone, "-c", CODE], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.stdout == "8 protections\n", done.stderr
