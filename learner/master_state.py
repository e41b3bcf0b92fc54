"""Float32 master weights and Adam's moments by parameter name, whatever the ZeRO stage and number of ranks.

Invariant: what `gather` yields is whole and the same for any partition, so `scatter` may put it into an
engine of another stage or world. Both are collectives: every rank iterates to the end. Called by
`learner.checkpoint`.

DeepSpeed reaches a parameter's part of its flat partitions by `safe_get_full_*` and `safe_set_full_*`; what
it lacks is Adam's state before the first step, which is made here as AdamW would make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
_FLAT_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # ZeRO 1 and 2, ZeRO 3


def trained(module: nn.Module) -> list[tuple[str, Any]]:
    """(name, parameter) of all that the optimizer updates, in one order on every rank."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def gather(engine: Any, module: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(name, {"weight", "exp_avg", "exp_avg_sq"}) of each trained parameter; whole, float32."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _make_adam_state(engine.optimizer, steps=None)
    whole = _whole_masters(engine.optimizer)
    for name, parameter in trained(module):
        master = whole.get(parameter)
        if master is not None:
            moments = engine.optimizer.optimizer.state[master]
            state: dict[str, Any] = {"weight": master} | {key: moments[key] for key in MOMENTS}
        else:
            state = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            state["weight"] = safe_get_full_fp32_param(parameter)
        yield name, {key: tensor.detach() for key, tensor in state.items()}


def scatter(engine: Any, module: nn.Module, read: Callable[[str, str], Tensor], steps: int) -> None:
    """Set each trained parameter from `read(name, "weight" or a moment)` and Adam's count to `steps`."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    _make_adam_state(engine.optimizer, steps)
    whole = _whole_masters(engine.optimizer)
    for name, parameter in trained(module):
        weight = read(name, "weight").to(parameter.device)
        moments = {key: read(name, key).to(parameter.device) for key in MOMENTS}
        master = whole.get(parameter)
        if master is not None:
            master.data.copy_(weight)
            for key, moment in moments.items():
                engine.optimizer.optimizer.state[master][key].copy_(moment)
        else:
            safe_set_full_fp32_param(parameter, weight)
            for key, moment in moments.items():
                safe_set_full_optimizer_state(parameter, moment, key)
        _set_model_weight(parameter, weight)


def adam_steps(engine: Any) -> int:
    """Updates that Adam has counted; skipped ones are not among them."""
    optimizer = engine.optimizer
    states = (optimizer.optimizer.state.get(flat, {}) for flat in _flat_masters(optimizer))
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def _make_adam_state(optimizer: Any, steps: int | None) -> None:
    """State as after `steps` updates (None: keep a count that is there), zeros where there is none yet."""
    for flat in _flat_masters(optimizer):
        state = optimizer.optimizer.state[flat]
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(flat, memory_format=torch.preserve_format)
        if steps is not None or "step" not in state:
            state["step"] = torch.tensor(float(steps or 0), dtype=torch.float32, device=flat.device)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()  # else the parameters do not see it before a step


def _whole_masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """The master weight of each parameter where ranks do not share them (ZeRO 0), else empty."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {model: master for group in pairs for model, master in zip(*group, strict=True)}


def _flat_masters(optimizer: Any) -> list[Tensor]:
    """What Adam updates: flat partitions, or whole master weights."""
    for name in _FLAT_MASTERS:
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    whole = list(_whole_masters(optimizer).values())
    if not whole:
        raise TypeError(
            f"DeepSpeed's {type(optimizer).__name__} keeps its master weights in an unknown place"
        )
    return whole


@torch.no_grad()
def _set_model_weight(parameter: Any, weight: Tensor) -> None:
    """The copy that forward and backward use, in the model's dtype."""
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(weight.view_as(parameter))
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(weight.view_as(parameter))
