"""The judge's own server: vLLM serving `judge.serve` to the rewards whose `endpoint` is "served".

Invariant: it answers before the first reward is asked; when it dies it is started again at the same address,
up to MAX_RESTARTS times; it ends with the launcher, however that ends. What a reward cannot get from it
meanwhile is unscored. Used by `launcher.train`, `launch.py eval` and `calibrate`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console

from configs.places import JUDGE_ENDPOINT_VARIABLE, JUDGE_KEY_VARIABLE
from configs.schema import RunConfig
from launcher.guard import kill_group, start_guarded, stop_guard
from launcher.interrupts import Interrupts
from launcher.preflight import PreflightError, Resources, free_port, prepare_model, python_path, visible_gpus

MAX_RESTARTS = 5
_LOOK_EVERY_S = 0.2
_ANSWER_S = 5.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine


class JudgeServer:
    """One server process, kept alive by a thread of this one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> None:
        self.url, self.log = url, log
        self.events: SimpleQueue[str] = SimpleQueue()  # for the user
        self.failure: str | None = None  # why it was given up
        self._command, self._environment = list(command), dict(environment)
        self._closing = threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep_alive, name="judge-server", daemon=True)
        self._keeper.start()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process, self._guard = start_guarded(self._command, self._environment, output)

    def _end(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()
        stop_guard(self._guard)

    def _keep_alive(self) -> None:
        restarts = 0
        while not self._closing.wait(_LOOK_EVERY_S):
            code = self._process.poll()
            if code is None:
                continue
            self._end()
            restarts += 1
            if restarts > MAX_RESTARTS:
                self.failure = f"its server ended {restarts} times, last with exit code {code}"
                return
            self.events.put(
                f"the judge's server ended with exit code {code}; it starts again, restart {restarts} of at "
                f"most {MAX_RESTARTS}"
            )
            try:
                self._start()
            except (OSError, subprocess.SubprocessError) as error:
                self.failure = f"its server cannot be started again: {error}"
                return

    def wait_until_it_answers(self, timeout_s: float, interrupts: Interrupts | None = None) -> None:
        """Returns early if a stop is asked for. Raises PreflightError."""
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if interrupts is not None and interrupts.requested:
                return
            if self.failure or not self.events.empty():
                raise PreflightError(
                    f"the judge's server cannot start: {_last_words(self.log)}; read {self.log}"
                )
            if time.monotonic() > deadline:
                raise PreflightError(
                    f"the judge's server did not answer within launch.startup_timeout_s = {timeout_s:g} s; "
                    f"read {self.log}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _answers(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/health", timeout=_ANSWER_S) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        self._closing.set()
        self._keeper.join()
        if self.failure is None:  # else it has ended already, and its pid may be another's
            self._end()


@contextmanager
def judge_server(
    config: RunConfig,
    resources: Resources,
    log: Path,
    console: Console,
    interrupts: Interrupts | None = None,
) -> Iterator[JudgeServer | None]:
    """A server that answers while the block runs, if the config asks for one. Raises PreflightError."""
    if not config.judge.serve:
        yield None
        return
    model = _model_of(config)
    host, key = config.buffer.host, secrets.token_hex(16)
    port = free_port(host)
    url = f"http://{host}:{port}"
    command = _command(config, model, resources, host, port)
    server = JudgeServer(command, _environment(config, key), url, log)
    before = {name: os.environ.get(name) for name in (JUDGE_ENDPOINT_VARIABLE, JUDGE_KEY_VARIABLE)}
    os.environ[JUDGE_ENDPOINT_VARIABLE], os.environ[JUDGE_KEY_VARIABLE] = f"{url}/v1", key
    try:
        started = time.monotonic()
        with console.status(f"starting the judge's server with {model}"):
            server.wait_until_it_answers(config.launch.startup_timeout_s, interrupts)
        seconds = time.monotonic() - started
        console.print(
            f"judge    {model} at {url}, ready after {seconds:.0f} s", highlight=False, soft_wrap=True
        )
        yield server
    finally:
        server.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _model_of(config: RunConfig) -> Path:
    try:
        return prepare_model(config.judge.serve)
    except PreflightError as error:
        raise PreflightError(str(error).replace("model.path", "judge.serve")) from error


def _command(config: RunConfig, model: Path, resources: Resources, host: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "actors.serve_model", str(model)),
        *("--device", resources.device, "--threads", str(resources.actor_threads)),
        *("--host", host, "--port", str(port), "--served-model-name", Path(config.judge.serve).name),
        *(word for name, value in config.judge.options.items() for word in _option(name, value)),
    ]


def _option(name: str, value: Any) -> list[str]:
    """A setting as `vllm serve` takes it: `max_model_len = 2048` is `--max-model-len 2048`."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag.removeprefix('--')}"]
    return [flag, value if isinstance(value, str) else json.dumps(value)]


def _environment(config: RunConfig, key: str) -> dict[str, str]:
    """With the last GPUs, which the roles leave to it."""
    environment = os.environ | {"PYTHONPATH": python_path(), "VLLM_API_KEY": key}
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[-config.judge.gpus :])
    return environment


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
