"""Sets DeepSpeed up: the process group, the engine's config, and its noise.

Invariant: gradients are accumulated until `engine.step()` and are exactly those of the loss that was
given (no division by a number of accumulation steps: it differs from batch to batch), averaged over
ranks. Called by `learner.trainer` and by `learner.learner` (which joins the group).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn


def join_group(rank: int, world: int, master: str, device: str, timeout_s: float) -> None:
    """Join the learners' process group. Every collective has the deadline `timeout_s`.

    `master` is "host:port" of rank 0. Sets the environment that DeepSpeed reads.
    """
    host, _, port = master.rpartition(":")
    os.environ.update(
        DS_ACCELERATOR=device,
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK="0",  # the launcher shows each process its own device only
        MASTER_ADDR=host,
        MASTER_PORT=port,
    )
    import deepspeed
    import deepspeed.ops

    # Else init would compile a shared-memory all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        verbose=False,
    )


def make_engine(
    module: nn.Module,
    parameter_groups: list[dict[str, Any]],
    *,
    zero_stage: int,
    dtype: str,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    max_grad_norm: float,
    offload: str = "none",
) -> Any:
    """Wrap `module` for training: AdamW with float32 master weights, gradient clipping, ZeRO.

    `parameter_groups` are torch's; a group without an `lr` gets `lr`.
    """
    import deepspeed

    if zero_stage == 0 and dtype == "float32":
        # DeepSpeed's bare float32 path neither reports the gradient norm nor skips NaN. Stage 1 does both,
        # computes the same, and the float32 optimizer state is then shared by the ranks.
        zero_stage = 1
    # fused: one pass over memory per update, on CPU as on CUDA; DeepSpeed's own Adam would need compiling.
    optimizer = torch.optim.AdamW(parameter_groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": False}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # engine.step() is the boundary, whenever we call it
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU as well
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if zero_stage == 0:
        # To allocate its state DeepSpeed has taken a step on zero gradients, and Adam would correct its first
        # real step as if it were the second.
        for state in optimizer.state.values():
            state["step"].zero_()
    return engine
