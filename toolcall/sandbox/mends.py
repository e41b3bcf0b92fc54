"""What to do where the kernel refuses what the sandbox needs, from what the machine says of itself.

Called by `toolcall.sandbox.server` with the refusal's own words.
"""

from __future__ import annotations

from pathlib import Path

_CALLS = ("unshare: ", "clone: ", "mount of ", "pivot_root: ")
_DOCKER = (
    "this is a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined (or a seccomp profile that allows unshare, clone, mount and "
    "pivot_root), and as root with --cap-add SYS_ADMIN"
)
_APPARMOR = "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
_COUNT = "sysctl user.max_user_namespaces=10000"
_DEBIAN = "sysctl kernel.unprivileged_userns_clone=1"
_CONTAINER_SIGNS = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")


def mend(refusal: str, root: Path = Path("/")) -> str:
    """`; ` and what to do; empty where nothing is known. root: of the machine, for tests."""
    if not any(call in refusal for call in _CALLS):
        return ""
    sysctl = root / "proc/sys"
    if _says(sysctl / "user/max_user_namespaces", "0"):
        return f"; as root: {_COUNT}"
    if any((root / sign).exists() for sign in _CONTAINER_SIGNS):
        return f"; since {_DOCKER}"
    if _says(sysctl / "kernel/apparmor_restrict_unprivileged_userns", "1"):
        return f"; as root: {_APPARMOR}"
    if _says(sysctl / "kernel/unprivileged_userns_clone", "0"):
        return f"; as root: {_DEBIAN}"
    return f"; if {_DOCKER}"


def _says(file: Path, value: str) -> bool:
    try:
        return file.read_text(encoding="ascii").strip() == value
    except OSError:
        return False
