"""Roles as Ray actors, one process each.

Invariant: a role's process has all it needs before its module is imported (threads, GPU, import
path), writes its output to `logs/<name>.log` of the run, and takes its children with it when it
ends. A local cluster ends with the launcher, whatever ends that.

`RayRoles` is what `launcher.supervisor` calls `Roles`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

# Read by Ray at its import: no idle workers, no usage report, agents that give up soon on a dead cluster,
# roles at the launcher's own priority (Ray's default of nice 15 lets any other work starve a run).
os.environ.update(
    RAY_worker_niceness="0",
    RAY_enable_worker_prestart="0",
    RAY_prestart_worker_first_driver="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="1",
)

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from configs.places import JUDGE_ENDPOINT_VARIABLE, JUDGE_KEY_VARIABLE
from configs.roles import EndsRun, RoleSpec
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from launcher.guard import start_guard
from launcher.interfaces import Died, Done, Poll, Running
from launcher.preflight import PreflightError, free_port, python_path

ROLE_MAINS = {"buffer": "buffer.server:main", "actor": "actors.actor:main", "learner": "learner.learner:main"}
SFT_MAINS = ROLE_MAINS | {"actor": "actors.demonstrations:main"}

_PASSED_ON = (JUDGE_ENDPOINT_VARIABLE, JUDGE_KEY_VARIABLE)
_OBJECT_STORE_BYTES = 100 * 2**20  # nothing large goes through Ray
_SHORT_PATH = 40  # characters of a temp dir under which Ray's socket paths stay below the limit of 107
_PLACEMENT_TIMEOUT_S = 60.0
_SPARE_PLACES = 64  # of a local cluster, for actors that `scale` adds
_KILLED = "its process died without an exception: killed, or out of memory"


@dataclass(frozen=True)
class Ended:
    """How a role's main ended: `error` is None for a return, else the exception in one line."""

    error: str | None
    time: float  # unix seconds
    final: bool = False  # the error says that it ends the run


class RoleProcess:
    """The process of one role. Two threads: one in `run`, one for Ray."""

    def run(self, target: str, spec: RoleSpec) -> Ended:
        """Call `module:function` with `spec`, its output in the role's log. Returns when it ends."""
        start_guard(os.getpid(), [-os.getpgrp()])
        _log_to(RunFolder(spec.run_dir).logs / f"{spec.name}.log")
        print(f"--- {time.strftime('%F %T')} {spec.name} starts, pid {os.getpid()}", flush=True)
        sys.path.append(str(spec.config_dir))  # last: a user's file hides no installed package
        try:
            module, function = target.split(":")
            getattr(importlib.import_module(module), function)(spec)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the supervisor decides what follows
            traceback.print_exc()
            cause = f"{type(error).__name__}: {error}".rstrip(": ")
            return Ended(cause, time.time(), final=isinstance(error, EndsRun))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return Ended(None, time.time())


def _log_to(path: Path) -> None:
    """Send this process's output, and that of its children, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # Ray has put its own writers in their place


@dataclass(frozen=True)
class Handle:
    """A started role."""

    name: str
    actor: Any
    result: Any  # object reference of the `Ended`


class RayRoles:
    """Starts, watches and kills roles on a Ray cluster."""

    def __init__(
        self, config: RunConfig, device: Literal["cpu", "cuda"], mains: Mapping[str, str] | None = None
    ) -> None:
        self._mains = mains or (SFT_MAINS if config.sft.data else ROLE_MAINS)
        self._device = device
        self._gpus = {"actor": config.launch.gpus_per_actor, "learner": config.launch.gpus_per_learner}
        self._is_local = config.launch.ray_address is None
        self._actors = config.actors.count
        self._group = self._place(config)

    def start(self, spec: RoleSpec) -> Handle:
        options: dict[str, Any] = {
            "num_cpus": 0 if spec.role == "buffer" else 1,
            "num_gpus": self._gpus_of(spec.role),
            "max_concurrency": 2,
            "max_restarts": 0,
            "runtime_env": {"env_vars": _environment(spec)},
            "scheduling_strategy": self._where(spec),
        }
        actor: Any = ray.remote(RoleProcess)
        actor = actor.options(**options).remote()
        return Handle(spec.name, actor, actor.run.remote(self._mains[spec.role], spec))

    def poll(self, handle: Handle) -> Poll:
        ready, _ = ray.wait([handle.result], timeout=0)
        if not ready:
            return Running()
        try:
            ended: Ended = ray.get(handle.result, timeout=10)  # type: ignore[assignment]
        except RayActorError as error:
            return Died(_reason(error))
        except (RayError, GetTimeoutError) as error:
            return Died(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return Done() if ended.error is None else Died(ended.error, ended.time, ended.final)

    def kill(self, handle: Handle) -> None:
        ray.kill(handle.actor, no_restart=True)

    def room(self, specs: Sequence[RoleSpec]) -> int:
        """Places reserved at the start, and what the cluster has left beside them."""
        reserved = sum(spec.rank < self._actors for spec in specs)
        free, gpus = ray.available_resources(), self._gpus_of("actor")
        more = int(min(free.get("CPU", 0.0), free.get("GPU", 0.0) / gpus if gpus else float("inf")))
        return min(len(specs), reserved + more)

    def rendezvous(self) -> str:
        """`host:port` on the node of learner 0, for a new process group of the learners."""
        if self._is_local:
            return f"127.0.0.1:{free_port('127.0.0.1')}"
        node = placement_group_table(self._group)["bundles_to_node_id"][self._actors]
        address = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        return f"{address}:{free_port('')}"

    def _place(self, config: RunConfig) -> PlacementGroup:
        """Reserve one bundle for each actor, then one for each learner."""
        kinds = ["actor"] * config.actors.count + ["learner"] * config.learner.count
        bundles = [{"CPU": 1.0} | ({"GPU": gpus} if (gpus := self._gpus_of(k)) else {}) for k in kinds]
        group = placement_group(bundles, strategy=config.launch.placement)
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            raise PreflightError(
                f"the Ray cluster cannot place {config.actors.count} actors and {config.learner.count} "
                f"learners: it has {_amounts(ray.cluster_resources())}, of which "
                f"{_amounts(ray.available_resources())} are free; ask for fewer or add nodes"
            )
        return group

    def _gpus_of(self, role: str) -> float:
        return self._gpus.get(role, 0) if self._device == "cuda" else 0

    def _where(self, spec: RoleSpec) -> Any:
        if spec.role == "buffer":  # beside the run folder and the endpoint that the launcher chose
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if spec.role == "actor" and spec.rank >= self._actors:
            return "DEFAULT"  # added by `scale`, after the places were reserved
        bundle = spec.rank if spec.role == "actor" else self._actors + spec.rank
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


@contextmanager
def cluster(config: RunConfig, run_dir: Path, gpus: int) -> Iterator[None]:
    """A local Ray cluster for the run, or a connection to the one at `launch.ray_address`."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    link = None
    try:
        if config.launch.ray_address:
            ray.init(address=config.launch.ray_address, **quiet)
        else:
            folder, link = _temp_dir(run_dir)
            ray.init(
                num_cpus=config.actors.count + config.learner.count + _SPARE_PLACES,  # not cores
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                **quiet,
            )
            # Ray's own agents take a minute to notice that the launcher was killed.
            children = psutil.Process().children(recursive=True)
            start_guard(os.getpid(), [child.pid for child in children])
        yield
    finally:
        ray.shutdown()
        if link is not None:
            link.unlink(missing_ok=True)  # a machine may clear /tmp in a long run


def _temp_dir(run_dir: Path) -> tuple[Path, Path | None]:
    """Ray's folder inside the run folder; by way of a short link where its socket paths got too long."""
    folder = run_dir.resolve() / "logs" / "ray"
    folder.mkdir(parents=True, exist_ok=True)
    if len(str(folder)) <= _SHORT_PATH:
        return folder, None
    link = Path(f"/tmp/slipstream-{os.getpid()}")
    link.unlink(missing_ok=True)  # of a killed launcher that had our pid
    link.symlink_to(folder)
    return link, link


def _environment(spec: RoleSpec) -> dict[str, str]:
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **dict.fromkeys(threads, str(spec.threads)),
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }


def _reason(error: RayActorError) -> str:
    """What Ray knows of a process's end, without its advice."""
    _, found, detail = str(error).partition("Worker exit detail: ")
    code = "exit code " + detail.rpartition("exit code ")[2].split(".")[0] if "exit code" in detail else ""
    return f"its process ended with {code}" if found and code else _KILLED


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
