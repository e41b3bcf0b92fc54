"""What can be refused before a model loads, and how a machine's cores and GPUs are shared.

Every refusal is a `PreflightError`: one sentence with the mend. Called by `launcher.commands`;
imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.run_folder import RunFolder
from configs.schema import RunConfig
from metrics.sinks import missing_library

REPO = Path(__file__).resolve().parent.parent
_PORTS = range(20_000, 32_000)


class PreflightError(Exception):
    """The run cannot start, and why, in one sentence with the mend."""


@dataclass(frozen=True)
class Resources:
    """How the machine is shared. `words` says it to the user."""

    device: Literal["cpu", "cuda"]
    gpus: int  # that the roles share, 0 on CPU
    actor_threads: int  # CPU threads of each engine
    learner_threads: int  # CPU threads of each learner rank
    words: str


def plan_resources(config: RunConfig, cores: int, gpus: int) -> Resources:
    """Share `cores` and `gpus` between the roles. Raises PreflightError if GPUs are short."""
    actors, learner = config.actors, config.learner
    of_judge = config.judge.gpus if config.judge.serve and gpus else 0
    if of_judge and of_judge >= gpus:
        raise PreflightError(
            f"judge.gpus = {of_judge} leaves none of this machine's {_count(gpus, 'GPU')} to the roles; "
            "serve the judge elsewhere and name its endpoint in the reward's options"
        )
    gpus -= of_judge
    if gpus:
        _refuse_missing_gpus(config, gpus)
        share = max(1, cores // (actors.count + learner.count))
        actor_threads, learner_threads = actors.threads or share, learner.threads or share
    else:
        # One thread an engine: with more, vLLM's CPU workers get in each other's way.
        actor_threads = actors.threads or 1
        left = max(0, cores - actors.count * actor_threads)
        learner_threads = learner.threads or max(1, left // learner.count)
    words = (
        f"{_count(cores, 'core')}: {_count(actor_threads, 'thread')} for each of "
        f"{_count(actors.count, 'engine')}, {_count(learner_threads, 'thread')} for each of "
        f"{_count(learner.count, 'learner')}"
    )
    wanted = actors.count * actor_threads + learner.count * learner_threads
    if wanted > cores:
        words += f" ({wanted} threads take turns on {_count(cores, 'core')})"
    if gpus:
        words += f"; {_count(gpus, 'GPU')}: {config.launch.gpus_per_actor:g} for each engine, "
        words += f"{config.launch.gpus_per_learner:g} for each learner"
    if of_judge:
        words += f"; {_count(of_judge, 'GPU')} for the judge's server"
    return Resources("cuda" if gpus else "cpu", gpus, actor_threads, learner_threads, words)


def find_gpus() -> int:
    """CUDA devices of this machine that this process may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Their names for CUDA_VISIBLE_DEVICES, by that variable and nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(number) for number in range(count)]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def free_port(host: str) -> int:
    """A TCP port that is free now on `host` ("" for any address of this machine).

    Below the range that the kernel hands out for port 0, so that nobody (Ray starts a dozen servers)
    gets it by chance before the role that binds it is up.
    """
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError):
            _try_bind(host, port)
            return port
    raise PreflightError(
        f"no free port on {host!r} between {_PORTS.start} and {_PORTS.stop}; set buffer.port"
    )


def choose_endpoint(config: RunConfig) -> str:
    """The buffer's address: the port asked for, if it is free, or one that is."""
    host, port = config.buffer.host, config.buffer.port
    if host in ("0.0.0.0", "*", "::"):
        raise PreflightError(
            f"buffer.host = {host!r} is no address that roles can connect to; "
            "give the address of one interface of this machine"
        )
    try:
        _try_bind(host, port)
    except OSError as error:
        raise PreflightError(
            f"buffer.port = {port} on buffer.host = {host!r} cannot be used ({error.strerror or error}); "
            "set buffer.port = 0 to let a free one be chosen, or free the port"
        ) from None
    return f"tcp://{host}:{port or free_port(host)}"


def _try_bind(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the buffer's own socket does
        probe.bind((host, port))


def check_sinks(config: RunConfig) -> None:
    problem = missing_library(config.launch.sinks)
    if problem:
        raise PreflightError(problem)


def check_learner(config: RunConfig, device: str) -> None:
    """What only a GPU has. Raises PreflightError."""
    learner = config.learner
    if device == "cpu" and learner.offload != "none":
        raise PreflightError(
            f"learner.offload = {learner.offload!r} moves state from GPU to main memory, and this machine "
            'has no GPU: all of it is in main memory already; set learner.offload = "none"'
        )
    if device == "cpu" and learner.attention == "flash_attention_2":
        raise PreflightError(
            "learner.attention = 'flash_attention_2' needs a GPU, and this machine has none; "
            'set learner.attention = "auto"'
        )


def prepare_model(name_or_path: str) -> Path:
    """The model's folder, checked and, if it is the packaged one, made. Done in a process of its own
    because that needs torch; its progress line goes to the terminal."""
    return Path(run_module("learner.packaged_model", [name_or_path], f"preparing the model {name_or_path!r}"))


def python_path() -> str:
    """`PYTHONPATH` of a process that is to run this code, wherever it is started."""
    return os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_module(module: str, arguments: Sequence[str], what: str) -> str:
    """The last line that `python -m module` prints. Raises PreflightError with its `error: …` line."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": python_path()}
    errors, last = [], ""
    # Output to a file: a pipe that nobody reads before the errors end would stop a process that says much.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.PIPE, encoding="utf-8"
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip() or last
            if line.startswith("error: "):
                errors.append(line.removeprefix("error: ").strip())
            else:
                print(line, end="", file=sys.stderr, flush=True)
        process.wait()
        file.seek(0)
        output = file.read()
    if process.returncode != 0 or not output.strip():
        raise PreflightError(errors[0] if errors else f"{what} failed: {last}")
    return output.splitlines()[-1]


@contextmanager
def run_lock(folder: RunFolder) -> Iterator[None]:
    """Hold a run folder for this process. The lock goes with the process, however it ends; a folder
    that was made for it and got nothing else goes too."""
    folder.root.mkdir(parents=True, exist_ok=True)
    with folder.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PreflightError(
                f"run folder {folder.root} is in use by process {file.read().strip() or '?'}; "
                "stop that run first, or start another one with --name"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if list(folder.root.iterdir()) == [folder.lock]:
                folder.lock.unlink()
                folder.root.rmdir()


def _refuse_missing_gpus(config: RunConfig, gpus: int) -> None:
    launch, actors, learners = config.launch, config.actors.count, config.learner.count
    wanted = actors * launch.gpus_per_actor + learners * launch.gpus_per_learner
    if launch.ray_address is None and wanted > gpus:
        raise PreflightError(
            f"{_count(actors, 'actor')} with {launch.gpus_per_actor:g} and {_count(learners, 'learner')} "
            f"with {launch.gpus_per_learner:g} GPUs each need {wanted:g}, but this machine has {gpus}; lower "
            "--actors, --learners, --launch.gpus_per_actor or --launch.gpus_per_learner, or give a cluster "
            "by --ray-address"
        )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
