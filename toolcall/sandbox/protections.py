"""Which protections hold on this machine, measured from inside a box rather than assumed.

Used by `launch.py check` and at the start of a run, through the `python` tool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from toolcall.sandbox.client import Sandbox
from toolcall.sandbox.types import Limits, SandboxUnavailable

_PROBE = """
import json, os, resource, socket
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
limits = (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
def refused(call):
    try:
        call()
    except OSError:
        return True
    return False
def many():
    ends = os.pipe()
    for _ in range(PROCESSES + 1):  # each waits for the end of this one
        if os.fork() == 0:
            os.close(ends[1])
            os.read(ends[0], 1)
            os._exit(0)
print(json.dumps({
    "no network": refused(socket.socket),
    "sees its own processes only": len([p for p in os.listdir("/proc") if p.isdigit()]) <= 2,
    "sees no files but the interpreter's": not any(map(os.path.exists, ("/etc/hostname", "/sys", "/boot"))),
    "writes nothing but /tmp": all(refused(lambda: open(d + "/x", "w")) for d in ("", "/usr", "/dev")),
    "no capabilities": int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0,
    "gains no privileges": status["NoNewPrivs"] == "1",
    "no dangerous system calls": status["Seccomp"] == "2",
    "limits hold": all(resource.getrlimit(limit)[1] >= 0 for limit in limits) and refused(many),
}))
"""


@dataclass(frozen=True)
class Protection:
    name: str
    holds: bool


async def measure(sandbox: Sandbox) -> list[Protection]:
    """Raises SandboxUnavailable if there is no sandbox, or one of its protections does not hold."""
    limits = Limits(wall_s=120, cpu_s=60, processes=4)  # the machine may be starved
    result = await sandbox.run(f"PROCESSES = {limits.processes}\n{_PROBE}", limits=limits)
    if not result.ok:
        raise SandboxUnavailable(f"the sandbox's probe failed: {result.stderr or result.ended}")
    found = [Protection(name, bool(holds)) for name, holds in json.loads(result.stdout).items()]
    if missing := [protection.name for protection in found if not protection.holds]:
        raise SandboxUnavailable(f"the sandbox on this machine does not hold: {', '.join(missing)}")
    return found
