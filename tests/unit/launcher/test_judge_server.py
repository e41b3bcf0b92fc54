"""The judge's own server: started, kept alive, ended; and what is refused before."""

import io
import os
import signal
import sys
import urllib.request

import psutil
import pytest
from rich.console import Console

from configs.load import load_config
from configs.places import JUDGE_ENDPOINT_VARIABLE
from configs.schema import RunConfig
from launcher import guard
from launcher import judge_server as module
from launcher.judge_server import JudgeServer, judge_server
from launcher.preflight import PreflightError, free_port, plan_resources
from launcher.prepare import read_tasks

SERVER = """
import http.server, os, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {os.environ.get('VLLM_API_KEY')}".encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
DEADLINE_S = 120.0


@pytest.fixture
def start(tmp_path):
    """Starts servers of the code given, and ends them."""
    started = []

    def start_one(code=SERVER):
        port = free_port("127.0.0.1")
        command = [sys.executable, "-c", code, str(port)]
        log = tmp_path / "judge.log"
        started.append(JudgeServer(command, dict(os.environ), f"http://127.0.0.1:{port}", log))
        return started[-1]

    yield start_one
    for server in started:
        server.close()


def pid_of(server):
    with urllib.request.urlopen(server.url, timeout=30) as reply:
        return int(reply.read().split()[0])


def test_a_server_that_is_killed_is_started_again_at_its_address_and_said(start):
    server = start()
    server.wait_until_it_answers(DEADLINE_S)
    first = pid_of(server)
    os.kill(first, signal.SIGKILL)
    assert "exit code -9; it starts again, restart 1" in server.events.get(timeout=DEADLINE_S)
    server.wait_until_it_answers(DEADLINE_S)
    assert pid_of(server) != first and server.failure is None


def test_a_server_that_ends_again_and_again_is_given_up(start, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESTARTS", 1)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    server = start("import sys; sys.exit(3)")
    server._keeper.join(DEADLINE_S)
    assert server.failure == "its server ended 2 times, last with exit code 3"


def test_m7_a_server_that_cannot_be_started_again_is_a_failure_and_leaves_no_process(start, monkeypatch):
    server = start()
    server.wait_until_it_answers(DEADLINE_S)
    started = []

    def no_guard(watched, victims):
        started.append(-victims[0])
        raise OSError("no more processes")

    monkeypatch.setattr(guard, "start_guard", no_guard)
    os.kill(pid_of(server), signal.SIGKILL)
    server._keeper.join(DEADLINE_S)
    assert server.failure == "its server cannot be started again: no more processes"
    assert not psutil.pid_exists(started[0])


def test_a_server_that_cannot_start_is_refused_with_its_last_words(start):
    server = start("raise SystemExit('no such model')")
    with pytest.raises(PreflightError, match=r"cannot start: no such model; read .*judge\.log"):
        server.wait_until_it_answers(DEADLINE_S)


def test_nothing_is_left_after_the_block_and_rewards_know_the_address_inside(tmp_path, monkeypatch):
    config = RunConfig.model_validate({"judge": {"serve": "a-judge"}})
    monkeypatch.setattr(module, "prepare_model", lambda name: tmp_path / name)
    monkeypatch.setattr(
        module, "_command", lambda config, model, *rest: [sys.executable, "-c", SERVER, str(rest[-1])]
    )
    console, resources = Console(file=io.StringIO()), plan_resources(config, 2, 0)
    with judge_server(config, resources, tmp_path / "judge.log", console) as server:
        assert server is not None
        assert os.environ[JUDGE_ENDPOINT_VARIABLE] == f"{server.url}/v1"
        process = psutil.Process(pid_of(server))
    assert JUDGE_ENDPOINT_VARIABLE not in os.environ
    assert not process.is_running() and "ready after" in console.file.getvalue()


RECIPE = """
[task]
data = "q.jsonl"
rewards = [{ use = "tasks.judge:judge", options = { endpoint = "served" } }]
[judge]
serve = "a-judge"
"""


def test_a_served_judge_without_a_model_to_serve_is_refused(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "?", "answer": "1"}\n')
    (tmp_path / "c.toml").write_text(RECIPE.replace('serve = "a-judge"', ""))
    with pytest.raises(PreflightError, match=r"has endpoint = .served..*set judge\.serve"):
        read_tasks(load_config(tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text(RECIPE + '[launch]\nray_address = "host:6379"\n')
    with pytest.raises(PreflightError, match="start the judge's server yourself"):
        read_tasks(load_config(tmp_path / "c.toml"))


def test_a_judge_that_is_no_model_folder_is_refused_by_its_own_key(tmp_path):
    config = RunConfig.model_validate({"judge": {"serve": str(tmp_path / "none")}})
    resources, console = plan_resources(config, 2, 0), Console(file=io.StringIO())
    with (
        pytest.raises(PreflightError, match=r"^judge\.serve '.*none' is no folder"),
        judge_server(config, resources, tmp_path / "log", console),
    ):
        raise AssertionError("the block must not run")


def test_the_judge_gets_the_last_gpus_and_the_roles_the_others(monkeypatch):
    config = RunConfig.model_validate({"judge": {"serve": "x", "gpus": 2}})
    resources = plan_resources(config, 16, 4)
    assert resources.gpus == 2 and resources.words.endswith("2 GPUs for the judge's server")
    with pytest.raises(PreflightError, match=r"judge\.gpus = 2 leaves none of this machine's 2 GPUs"):
        plan_resources(config, 16, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert module._environment(config, "key")["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_options_are_those_of_vllm_serve():
    options = {"max_model_len": 4096, "enforce_eager": True, "async_scheduling": False, "seed": "7"}
    words = [word for name, value in options.items() for word in module._option(name, value)]
    assert words == ["--max-model-len", "4096", "--enforce-eager", "--no-async-scheduling", "--seed", "7"]
