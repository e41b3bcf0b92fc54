"""Small mains of roles, and a launcher of them that a test can kill: `python small_roles.py RUN_DIR`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from configs.roles import EndsRun, RoleSpec
from configs.schema import RunConfig

MODULE = "tests.integration.small_roles"


def returns(spec: RoleSpec) -> None:
    print("threads", os.environ["OMP_NUM_THREADS"], "rank", spec.rank, flush=True)
    subprocess.run(["echo", "from a child"], check=True)
    import mcp

    print("mcp is", mcp.__file__, flush=True)


def raises(spec: RoleSpec) -> None:
    raise EndsRun("no such thing")


def stays(spec: RoleSpec) -> None:
    """With a child and a grandchild, as an engine has."""
    sleep = "import time; time.sleep(300)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    subprocess.Popen([sys.executable, "-c", child])
    print("staying", flush=True)
    time.sleep(300)


def spec(run_dir: Path, role: str, name: str, rank: int = 0) -> RoleSpec:
    return RoleSpec(
        role=role,  # type: ignore[arg-type]
        name=name,
        rank=rank,
        world=1,
        config=RunConfig(),
        run_dir=run_dir,
        run_id="r",
        config_dir=run_dir,
        model_path=run_dir,
        num_prompts=1,
        buffer_endpoint="tcp://127.0.0.1:1",
        device="cpu",
        threads=3,
    )


if __name__ == "__main__":
    from launcher.ray_roles import RayRoles, cluster

    # A shell that runs the tests in the background ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(sys.argv[1])
    with cluster(RunConfig(), folder, 0):
        roles = RayRoles(RunConfig(), "cpu", {"actor": f"{MODULE}:stays"})
        roles.start(spec(folder, "actor", "actor-0"))
        print("started", flush=True)
        time.sleep(300)
