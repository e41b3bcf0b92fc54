"""The disk backend: a version is a safetensors file in a folder that learner and actors share.

For machines that have no more in common than a file system and the way to the learner. The file is there only
while it is fetched. Opened by `weightsync.transport`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weightsync.offers import OfferGroup
from weightsync.version import Checksum, Manifest


def clear(folder: Path) -> None:
    """Remove what a learner that was killed has left there."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)


class FileGroup(OfferGroup):
    def offer(self, manifest: Manifest, flat: torch.Tensor, number: int) -> str:
        folder = Path(self._spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._spec.name.replace('/', '-')}-{number}.safetensors"
        written = path.with_suffix(".part")
        save_file(dict(manifest.views(flat)), written)
        os.replace(written, path)
        return str(path)

    def fetch(self, place: str, manifest: Manifest, flat: torch.Tensor) -> int:
        if not Path(place).is_file():
            raise RuntimeError(
                f'{place} is not on this machine; weightsync.backend = "disk" needs a run folder that every '
                "actor reaches by the same path"
            )
        try:
            with safe_open(place, framework="pt") as file:
                for slot in manifest.slots:
                    manifest.view(flat, slot).copy_(file.get_tensor(slot.name))
        except SafetensorError as error:
            raise RuntimeError(f"{place} cannot be read: {error}") from error
        checksum = Checksum()
        checksum.add(flat)
        return checksum.value()

    def withdraw(self, place: str) -> None:
        Path(place).unlink(missing_ok=True)
