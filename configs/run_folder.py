"""The layout of a run folder and the run's CURVE keys.

    runs/<name>/config.toml  run.json  endpoint  metrics.jsonl  events.jsonl  logs/<role>.log
                buffer.sqlite  tools/  weights/  keys/{server,client}.key  checkpoints/step-<n>/  export/
                eval/

Invariant: key files are readable by the owner alone. Used by every role.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True)
class CurveKeys:
    """Z85 keys. The server accepts exactly the one client key of the run (every role shares it)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def run_info(self) -> Path:
        """JSON: `run_id`, and `config_dir`, the folder of the recipe that the run was started from."""
        return self.root / "run.json"

    @property
    def endpoint(self) -> Path:
        """The buffer's address, for `launch.py status`."""
        return self.root / "endpoint"

    @property
    def lock(self) -> Path:
        """Held by the launcher while the run goes on."""
        return self.root / ".lock"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def store(self) -> Path:
        return self.root / "buffer.sqlite"

    @property
    def tools(self) -> Path:
        """What the actors' tools share: limits of the whole run, the disk cache."""
        return self.root / "tools"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Versions on their way to the engines, with `weightsync.backend = "disk"`."""
        return self.root / "weights"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    def origin(self) -> Path | None:
        """The `config_dir` of this run, or None if the folder is not a run's."""
        if not self.run_info.exists():
            return None
        return Path(json.loads(self.run_info.read_text(encoding="utf-8"))["config_dir"])

    def create_keys(self) -> CurveKeys:
        """Make the run's keys once; a second call reads them back."""
        folder = self.root / "keys"
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            for name in ("server", "client"):
                public, secret = zmq.curve_keypair()
                fd = os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(public + b"\n" + secret + b"\n")
        return self.read_keys()

    def read_keys(self) -> CurveKeys:
        pairs = [(self.root / "keys" / f"{n}.key").read_bytes().split() for n in ("server", "client")]
        (server_public, server_secret), (client_public, client_secret) = pairs
        return CurveKeys(server_public, server_secret, client_public, client_secret)
