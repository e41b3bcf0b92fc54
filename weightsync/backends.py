"""Which backend carries the weights to a group of engines, and what a backend cannot reach.

Devices are named as by `weightsync.transport.device_name`: "cpu@<machine>" or "cuda:<uuid>@<machine>".
Pure; used by `weightsync.coordinator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def choose(setting: str, learner: str, engines: Iterable[Sequence[str]]) -> str:
    """The backend for `engines`, each the devices of its workers, with `weightsync.backend = setting`."""
    if setting != "auto":
        return setting
    devices = [learner, *(device for workers in engines for device in workers)]
    if _each_has_a_gpu(devices):
        return "nccl"
    return "shm" if shares_memory(setting, learner) and _on_one_machine(devices) else "gloo"


def shares_memory(setting: str, learner: str) -> bool:
    """Whether the learner's snapshots lie where the engines of its machine can read them. A learner with a
    GPU has pinned memory instead, unless the config names shm."""
    return setting == "shm" or (setting == "auto" and _kind(learner) == "cpu")


def refusal(setting: str, learner: str, name: str, workers: Sequence[str]) -> str | None:
    """Why the engine `name` cannot be reached by the backend that the config names; None if it can."""
    devices = [learner, *workers]
    if setting == "nccl" and not _each_has_a_gpu(devices):
        return (
            'weightsync.backend = "nccl" needs a CUDA device of its own for every engine and the learner, '
            f"but {name} has {', '.join(map(_kind, workers))} and the learner {_kind(learner)}; "
            'set it to "auto" or "gloo"'
        )
    if setting == "shm" and not _on_one_machine(devices):
        return (
            'weightsync.backend = "shm" needs every engine on the learner\'s machine, in its container and '
            f'as its user, and {name} is not; set it to "auto" or "gloo"'
        )
    return None


def _each_has_a_gpu(devices: Sequence[str]) -> bool:
    """nccl takes CUDA devices only, and each once."""
    kinds = [_kind(device) for device in devices]
    return all(kind.startswith("cuda") for kind in kinds) and len(set(kinds)) == len(kinds)


def _on_one_machine(devices: Sequence[str]) -> bool:
    return len({device.partition("@")[2] for device in devices}) == 1


def _kind(device: str) -> str:
    return device.partition("@")[0]
