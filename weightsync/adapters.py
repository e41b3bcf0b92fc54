"""Low-rank adapters travel alone; the engine's worker adds them to the base model that it was started with.

For the weight W of a linear layer, called NAME, a version holds `NAME.lora_A` and `NAME.lora_B` (with the
scaling in it), and the engine gets W + B A. Invariant: what is loaded is always a whole model, so that an
engine does not depend on earlier versions. Sent by `learner.lora`, merged by `weightsync.worker` before the
pause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

A, B = ".lora_A", ".lora_B"


def are_adapters(names: Iterable[str]) -> bool:
    return any(name.endswith(A) for name in names)


def base_names(base: Path) -> set[str]:
    """Names of the weights in the model folder; empty if it has no safetensors."""
    names: set[str] = set()
    for path in _files(base):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def merged(
    adapters: Iterable[tuple[str, torch.Tensor]], base: Path, dtype: torch.dtype
) -> list[tuple[str, torch.Tensor]]:
    """Every weight of `base` in `dtype`, with what its adapter adds. Raises RuntimeError for an adapter of a
    weight that is not there."""
    left = dict(adapters)
    whole: list[tuple[str, torch.Tensor]] = []
    for path in _files(base):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                weight = file.get_tensor(name).to(dtype)
                if (low := left.pop(name + A, None)) is not None:
                    added = left.pop(name + B).float() @ low.float()
                    weight = (weight.float() + added).to(dtype)
                whole.append((name, weight))
    if left:
        raise RuntimeError(f"the model in {base} has no weight for the adapter {min(left)}")
    return whole


def _files(base: Path) -> list[Path]:
    index = base / "model.safetensors.index.json"
    if index.exists():
        return [base / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [path for path in [base / "model.safetensors"] if path.exists()]
