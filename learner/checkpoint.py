"""Checkpoints that survive a kill at any moment, and the export to a Hugging Face folder.

    step-<n>/  config.json, tokenizer, model-*.safetensors and their index: a model folder that loads as it is
               training/rank-<r>.safetensors: Adam's moments, and what is trained beside the model's weights
               state.json: step, weight version, Adam's count, score

Invariants: `step-<n>` exists only complete: everything is written and synced in a temporary folder, which is
renamed in one operation. Nothing in it depends on the ZeRO stage or the number of ranks; each rank writes a
share of the parameters. `snapshot`, `restore` and `export` are collectives; `write` and `complete` are not,
so that they can run while the next step trains. Called by `learner.checkpointer` and `learner.learner`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner import lora, master_state
from learner.trainer import Trainer

_STATE = "state.json"
_INDEX = "model.safetensors.index.json"
_MODEL = "hf."  # prefix of the names of what engines get, within the policy
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
class Snapshot:
    """One rank's share of a checkpoint, copied to main memory: training may go on."""

    progress: Progress
    score: float  # mean reward of the steps that led to it
    adam_steps: int
    rank: int
    world: int
    model: dict[str, Tensor]  # float32 weights by Hugging Face name
    training: dict[str, Tensor]  # by kind/name
    model_path: Path
    model_config: Any  # transformers' config


# --- what there is --------------------------------------------------------------------------------


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint below the folder `checkpoints`, if any."""
    complete = complete_ones(checkpoints)
    return complete[-1] if complete else None


def complete_ones(checkpoints: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted((p for p in checkpoints.glob("step-*") if (p / _STATE).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def score_of(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / _STATE).read_text()).get("score", 0.0))


# --- writing --------------------------------------------------------------------------------------


def snapshot(trainer: Trainer, progress: Progress, score: float) -> Snapshot:
    """Copy this rank's share. A collective."""
    model: dict[str, Tensor] = {}
    training: dict[str, Tensor] = {}
    is_full = not trainer.config.lora_rank
    shares = _shares(trainer)
    for name, state in master_state.gather(trainer.engine, trainer.policy):
        if shares[name] != trainer.rank:
            continue
        for kind, tensor in state.items():
            of_model = kind == "weight" and is_full and name.startswith(_MODEL)
            target, key = (model, name.removeprefix(_MODEL)) if of_model else (training, f"{kind}/{name}")
            target[key] = tensor.to("cpu", copy=True).contiguous()
    return Snapshot(
        progress=progress,
        score=score,
        adam_steps=master_state.adam_steps(trainer.engine),
        rank=trainer.rank,
        world=trainer.world,
        model=model,
        training=training,
        model_path=trainer.model_path,
        model_config=trainer.policy.hf.config if is_full else None,
    )


def _shares(trainer: Trainer) -> dict[str, int]:
    """The rank that writes each parameter: always the one with the least so far."""
    loads = [0] * trainer.world
    shares = {}
    for name, parameter in master_state.trained(trainer.policy):
        shares[name] = loads.index(min(loads))
        loads[shares[name]] += getattr(parameter, "ds_numel", parameter.numel())
    return shares


def write(taken: Snapshot, checkpoints: Path) -> None:
    """Write this rank's files and sync them, in the temporary folder (ranks share the file system)."""
    work = _work_folder(taken, checkpoints)
    (work / "training").mkdir(parents=True, exist_ok=True)
    written = [work / "training" / f"rank-{taken.rank}.safetensors"]
    save_file(taken.training, written[0])
    if taken.model:
        written.append(work / _model_file(taken.rank, taken.world))
        save_file(taken.model, written[1], metadata={"format": "pt"})
    _sync(written)  # not the folder: the files of other ranks come and go meanwhile


def complete(taken: Snapshot, checkpoints: Path, keep: int, keep_best: int) -> Path:
    """Rank 0, once all have written: make the checkpoint exist, and drop those not kept."""
    work, target = _work_folder(taken, checkpoints), checkpoints / f"step-{taken.progress.step}"
    if taken.model_config is not None:
        _copy_model_files(taken.model_path, taken.model_config, work)
        (work / _INDEX).write_text(json.dumps(_index(work)))
    state = {
        "step": taken.progress.step,
        "version": taken.progress.version,
        "adam_steps": taken.adam_steps,
        "score": taken.score,
    }
    (work / _STATE).write_text(json.dumps(state))
    _sync([path for path in work.rglob("*") if path.is_file()])
    if target.exists():  # a resumed run repeats the step
        _drop(target)
    work.rename(target)
    _sync_folder(checkpoints)
    found = complete_ones(checkpoints)
    best = sorted(found, key=lambda p: (score_of(p), step_of(p)), reverse=True)[:keep_best]
    for old in set(found) - set(found[-keep:]) - set(best):
        _drop(old)
    return target


def _drop(checkpoint: Path) -> None:
    """Remove it; a kill on the way leaves nothing that looks complete."""
    dropped = checkpoint.with_name(f".{checkpoint.name}.dropped")
    checkpoint.rename(dropped)
    shutil.rmtree(dropped)


def clear_leftovers(checkpoints: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for left in checkpoints.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _work_folder(taken: Snapshot, checkpoints: Path) -> Path:
    return checkpoints / f".step-{taken.progress.step}.partial"


def _model_file(rank: int, world: int) -> str:
    return f"model-{rank + 1:05d}-of-{world:05d}.safetensors"


def _index(folder: Path) -> dict[str, Any]:
    """Which file holds which weight, as transformers and vLLM read it."""
    weight_map, size = {}, 0
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            weight_map.update(dict.fromkeys(file.keys(), path.name))
        size += path.stat().st_size
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


# --- reading --------------------------------------------------------------------------------------


def restore(trainer: Trainer, checkpoint: Path) -> Progress:
    """Load weights and optimizer into `trainer`. A collective. Raises ValueError if they do not fit."""
    state = json.loads((checkpoint / _STATE).read_text())
    if "adam_steps" not in state:
        raise ValueError(
            f"checkpoint {checkpoint} is of an older format; finish its run with the Slipstream that began "
            "it, or start a new run from its export"
        )
    paths = [*checkpoint.glob("model-*.safetensors"), *checkpoint.glob("training/rank-*.safetensors")]
    files = [safe_open(path, "pt") for path in paths]
    place = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - no dict

    def read(name: str, kind: str) -> Tensor:
        key = f"{kind}/{name}"
        if kind == "weight" and key not in place:
            key = name.removeprefix(_MODEL)
        if key not in place:
            raise ValueError(
                f"checkpoint {checkpoint} has no {kind} of {name}: it was written with other settings of "
                "learner.lora_rank or learner.adv_estimator; resume with the same"
            )
        return place[key].get_tensor(key)

    master_state.scatter(trainer.engine, trainer.policy, read, state["adam_steps"])
    dist.barrier()
    return Progress(step=state["step"], version=state["version"])


# --- export ---------------------------------------------------------------------------------------


def export(trainer: Trainer, folder: Path) -> None:
    """Write weights, config, tokenizer and chat template so that vLLM and transformers load `folder`.

    With `lora_export = "adapter"` the adapter alone, for peft and vLLM on top of the model it began with.
    """
    work = folder.with_name(f".{folder.name}.partial")
    if trainer.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    if trainer.config.lora_rank and trainer.config.lora_export == "adapter":
        if trainer.rank == 0:
            lora.save_adapter(trainer.policy.hf, trainer.config, trainer.model_path, work)
    else:
        _export_model(trainer, work)
    if trainer.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    dist.barrier()


def _export_model(trainer: Trainer, folder: Path) -> None:
    weights = {}
    for name, tensor in trainer.named_weights():  # a collective: all ranks iterate
        if trainer.rank == 0:
            weights[name] = tensor.to("cpu", copy=True).contiguous()
    if trainer.rank == 0:
        _copy_model_files(trainer.model_path, trainer.policy.hf.config, folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_model_files(model_path: Path, config: Any, folder: Path) -> None:
    """Everything but the weights. The tokenizer's own files: a round trip through classes may change them."""
    ignore = shutil.ignore_patterns(*_WEIGHT_FILES, ".*", "training", _STATE)
    shutil.copytree(model_path, folder, ignore=ignore, dirs_exist_ok=True)
    config.save_pretrained(folder)


def _sync(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for folder in {path.parent for path in files}:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
