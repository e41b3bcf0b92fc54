"""Places outside a run's folder: the cache on this machine, and models behind an address."""

from __future__ import annotations

import os
from pathlib import Path

# Where the judge's server that the launcher has started answers, for whoever asks it.
JUDGE_ENDPOINT_VARIABLE = "SLIPSTREAM_JUDGE_ENDPOINT"
JUDGE_KEY_VARIABLE = "SLIPSTREAM_JUDGE_KEY"


def cache_root() -> Path:
    """`$SLIPSTREAM_CACHE`, else `~/.cache/slipstream`: what is made once on a machine."""
    return Path(os.environ.get("SLIPSTREAM_CACHE") or "~/.cache/slipstream").expanduser()


def is_endpoint(model: str) -> bool:
    """Is a `--model` the URL of an OpenAI-compatible server, rather than a folder?"""
    return model.startswith(("http://", "https://"))
