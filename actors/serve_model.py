"""A model behind vLLM's own OpenAI-compatible server, with the engine settings that fit this machine.

    python -m actors.serve_model FOLDER --device cpu --threads 1 --host 127.0.0.1 --port 8001

Further options are those of `vllm serve`. Run by `launcher.judge_server`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from actors.vllm_engine import CPU_BLOCK_SIZE, set_environment


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m actors.serve_model", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options, further = parser.parse_known_args(arguments)
    set_environment(options.device, options.threads)
    own = ["--generation-config", "vllm"]
    if options.device == "cpu":
        own += ["--enforce-eager", "--block-size", str(CPU_BLOCK_SIZE)]
    # Not the command `vllm`, which asks for the metadata of a package of that name: on a CPU it has another.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm serve", "--model", options.model, *own, *further]
    serve()


if __name__ == "__main__":
    main()
