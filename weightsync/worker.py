"""Weight updates inside vLLM's worker: the "slipstream" transfer engine and the worker extension.

Invariants: while bytes arrive the model is not touched; loading happens only in `finish_weight_update`,
under the receiver's pause; a failure before that leaves the old weights and a clean state, a failure
inside it marks the engine broken for good. vLLM imports this module in its worker (`EXTENSION`), which
registers `BACKEND`; `actors.vllm_engine` imports the two names. Driven through `weightsync.vllm_engine`.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from weightsync import adapters
from weightsync.staging import Prepare, Staging
from weightsync.transport import device_name
from weightsync.version import Manifest
from weightsync.watchdog import end_with_the_actor
from weightsync.wire import GroupSpec

BACKEND = "slipstream"
EXTENSION = "weightsync.worker.WorkerExtension"


@dataclass
class SlipstreamInitInfo(WeightTransferInitInfo):
    """`wire.GroupSpec` with the rank of the engine's first worker, and the size of a broadcast."""

    backend: str
    host: str
    port: int
    name: str
    rank: int
    world: int
    timeout_s: float
    folder: str
    bucket_bytes: int


@dataclass
class SlipstreamUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class SlipstreamTransferEngine(WeightTransferEngine[SlipstreamInitInfo, SlipstreamUpdateInfo]):
    init_info_cls = SlipstreamInitInfo
    update_info_cls = SlipstreamUpdateInfo
    supports_draft_weight_update = False
    defers_processing = True  # update_weights returns at once; finish_weight_update makes it so

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging = Staging(device)
        self._group: GroupSpec | None = None
        self._bucket_bytes = 0
        self._broken: str | None = None
        end_with_the_actor(in_engine_core=self.parallel_config.distributed_executor_backend != "mp")
        _silence_needless_warnings(model, tied_head=_has_packed_tied_head(model, self.model_config))

    def init_transfer_engine(self, init_info: SlipstreamInitInfo) -> None:
        """Only remember the group: meeting its ranks would block generation, so the thread does it."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        fields = vars(init_info).copy()
        self._bucket_bytes = fields.pop("bucket_bytes")
        group = GroupSpec(**fields)
        self._group = replace(group, rank=group.rank + worker)

    def start_weight_update(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"an earlier weight update broke this engine: {self._broken}")
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine must come before start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not super(): it synchronises the device, which would stop generation until the bytes are here.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SlipstreamUpdateInfo) -> None:
        assert self._group is not None
        shapes = [tuple(shape) for shape in update_info.shapes]
        manifest = Manifest.of(zip(update_info.names, update_info.dtypes, shapes, strict=True))
        self.staging.begin(self._group, manifest, self._bucket_bytes, self._prepare(update_info.names))
        if self.device.type == "cpu":
            _give_freed_memory_back()

    def _prepare(self, names: list[str]) -> Prepare:
        if not adapters.are_adapters(names):
            return lambda tensors: tensors
        base, dtype = Path(self.model_config.model), self.model_config.dtype
        return lambda tensors: adapters.merged(tensors, base, dtype)

    def finish_weight_update(self) -> None:
        """Load what is staged. Raises before the model is touched if that is not complete."""
        tensors = self.staging.tensors()
        model: Any = self.model
        self._broken = "loading was not completed"
        try:
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            finalize_layerwise_reload(model, self.model_config)
            if _has_packed_tied_head(model, self.model_config):
                head = model.lm_head
                head.quant_method.process_weights_after_loading(head)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self._broken = None
        self.staging.discard()

    def shutdown(self) -> None:
        self.staging.close()


class WorkerExtension:
    """Methods that vLLM adds to its worker; called by `collective_rpc`."""

    weight_transfer_engine: SlipstreamTransferEngine
    device: torch.device
    _weight_update_active: bool

    def staged_weights(self) -> tuple[bool, int, str]:
        return self.weight_transfer_engine.staging.status()

    def abort_weight_update(self) -> None:
        """Discard the transfer and vLLM's note of it, which would refuse the next one."""
        self.weight_transfer_engine.staging.discard()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False

    def weight_device(self) -> str:
        return device_name(self.device)


def _give_freed_memory_back() -> None:
    """glibc keeps it, in pieces: 55 updates of the 135M model left 3 GB behind."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _has_packed_tied_head(model: torch.nn.Module, model_config: Any) -> bool:
    """On CPU vLLM packs a copy of the tied embedding for the head, which no reload refreshes."""
    return (
        current_platform.is_cpu()
        and bool(model_config.hf_text_config.tie_word_embeddings)
        and hasattr(getattr(model, "lm_head", None), "cpu_linear")
    )


def _silence_needless_warnings(model: torch.nn.Module, *, tied_head: bool) -> None:
    """At every update the reload warns of layers that got no weights. Layers that have none to get (rotary
    tables) are no news, nor is the tied head, which `finish_weight_update` sees to."""
    needless = {type(layer).__name__ for layer in model.modules() if not list(layer.parameters())}
    if tied_head:
        needless.add(type(model.lm_head).__name__)
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(lambda record: not (isinstance(record.args, tuple) and set(record.args) & needless))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SlipstreamTransferEngine)
