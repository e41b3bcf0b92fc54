"""Low-rank adapters on the policy's linear layers (LoRA, arXiv:2106.09685), by peft.

Invariant: engines and exports see plain weights, W + (alpha / rank) B A, under their Hugging Face names; only
A and B are trained, and only they travel to the engines where those can merge them.
Called by `learner.trainer` and `learner.checkpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.schema import LearnerConfig
from weightsync.adapters import A, B, base_names

_BASE = ".base_layer."
_ADAPTER = "default"  # peft's name of the only adapter


def add_adapters(model: nn.Module, config: LearnerConfig) -> None:
    """Freeze `model` and put adapters beside its linear layers. Raises ValueError if none is named so."""
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError("learner.lora_rank needs peft; pip install --no-deps peft==0.21.2") from error
    inject_adapter_in_model(_peft_config(config), model)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight with its adapter added) of every parameter, in the model's dtype."""
    adapted = dict(_adapted(model))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight, plain = parameter.detach(), plain_name(name)
        if plain in adapted:
            with torch.no_grad():
                weight = (weight.float() + adapted[plain].get_delta_weight(_ADAPTER).float()).to(weight.dtype)
        yield plain, weight


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A and B of every adapted weight, as `weightsync.adapters` names and merges them."""
    for name, layer in _adapted(model):
        yield f"{name}{A}", layer.lora_A[_ADAPTER].weight.detach()
        yield f"{name}{B}", layer.lora_B[_ADAPTER].weight.detach() * layer.scaling[_ADAPTER]


def can_travel_alone(model: nn.Module, base: Path) -> bool:
    """Engines find every adapted weight in the model folder, under the name that it has here."""
    layers = dict(_adapted(model))
    plain = all(isinstance(layer.base_layer, nn.Linear) for layer in layers.values())
    return bool(layers) and plain and layers.keys() <= base_names(base)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(plain name of the weight, peft's layer)"""
    for name, _ in model.named_parameters():
        if name.endswith(f"{_BASE}weight"):
            yield plain_name(name), model.get_submodule(name.removesuffix(f"{_BASE}weight"))


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name that the parameter has without adapters."""
    return name.replace(_BASE, ".")


def save_adapter(model: nn.Module, config: LearnerConfig, base: Path, folder: Path) -> None:
    """Write A and B as peft and vLLM load them on top of the model in `base`."""
    weights = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = _peft_config(config)
    settings.base_model_name_or_path = str(base)
    described = {key: sorted(v) if isinstance(v, set) else v for key, v in settings.to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2, default=str))


def _peft_config(config: LearnerConfig) -> Any:
    from peft import LoraConfig

    targets: Any = config.lora_targets[0] if config.lora_targets == ["all-linear"] else config.lora_targets
    alpha: Any = config.lora_alpha  # peft says int and takes any number
    return LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=targets, bias="none")
