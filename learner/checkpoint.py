"""Checkpoints that survive a kill at any moment, and the export to a Hugging Face folder.

Invariant: `step-<n>` exists only complete: everything is written and synced in a temporary folder, which
is renamed in one operation. `save`, `restore` and `export` are collectives. Called by `learner.learner`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from learner.trainer import Trainer

_STATE = "state.json"
_TAG = "deepspeed"
_WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.gguf",
    "*.pt",
    "*.pth",
)


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the last step that the weights contain, and the weight version after it."""

    step: int = 0
    version: int = 0


@dataclass(frozen=True)
class _Format:
    zero_stage: int
    world: int


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint below the folder `checkpoints`, if any."""
    complete = _complete(checkpoints)
    return complete[-1] if complete else None


def oldest_step(checkpoints: Path) -> int:
    """Step of the oldest checkpoint kept; 0 without one."""
    complete = _complete(checkpoints)
    return _step_of(complete[0]) if complete else 0


def save(trainer: Trainer, progress: Progress, checkpoints: Path, keep: int) -> Path:
    """Write `step-<n>` and drop all but the `keep` newest. Returns its path on every rank."""
    target = checkpoints / f"step-{progress.step}"
    work = checkpoints / f".step-{progress.step}.partial"
    if trainer.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    dist.barrier()
    client_state = {"rng": torch.get_rng_state()}
    trainer.engine.save_checkpoint(str(work), tag=_TAG, client_state=client_state, save_latest=False)
    dist.barrier()
    if trainer.rank == 0:
        state = asdict(progress) | asdict(_format(trainer))
        (work / _STATE).write_text(json.dumps(state))
        _sync(work)
        shutil.rmtree(target, ignore_errors=True)  # only there if a resumed run repeats the step
        work.rename(target)
        _sync_folder(checkpoints)
        for old in _complete(checkpoints)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def restore(trainer: Trainer, checkpoint: Path) -> Progress:
    """Load weights, optimizer and random state into `trainer`. Raises ValueError if it does not fit."""
    state = json.loads((checkpoint / _STATE).read_text())
    now = _format(trainer)
    then = _Format(state["zero_stage"], state["world"])
    if now.zero_stage != then.zero_stage or (now.zero_stage > 0 and now.world != then.world):
        raise ValueError(
            f"checkpoint {checkpoint} was written with ZeRO stage {then.zero_stage} on "
            f"{then.world} learners and cannot be read with {now.zero_stage} on {now.world}; "
            "resume with the same learner.zero_stage and number of learners"
        )
    path, client_state = trainer.engine.load_checkpoint(str(checkpoint), tag=_TAG)
    if path is None:
        raise ValueError(f"checkpoint {checkpoint} is not readable; delete it to resume from an older one")
    torch.set_rng_state(client_state["rng"])
    return Progress(step=state["step"], version=state["version"])


def export(trainer: Trainer, folder: Path) -> None:
    """Write weights, config, tokenizer and chat template so that vLLM and transformers load `folder`."""
    weights = {}
    for name, tensor in trainer.named_weights():  # a collective: all ranks iterate
        if trainer.rank == 0:
            weights[name] = tensor.to("cpu", copy=True).contiguous()
    if trainer.rank == 0:
        work = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        # The model folder's own tokenizer files are copied: a round trip through classes may change them.
        shutil.copytree(trainer.model_path, work, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"))
        trainer.policy.hf.config.save_pretrained(work)
        save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    dist.barrier()


def _format(trainer: Trainer) -> _Format:
    return _Format(trainer.engine.zero_optimization_stage(), trainer.world)


def _complete(checkpoints: Path) -> list[Path]:
    found = [p for p in checkpoints.glob("step-*") if (p / _STATE).is_file()]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
