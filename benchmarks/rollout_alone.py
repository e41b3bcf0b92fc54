"""vLLM alone, for `benchmarks/rollout.py`: the same prompts, lengths and observations without an agent loop.

`refilled` drives vLLM's own synchronous engine in one process, each turn asked for as soon as the one
before has ended: the least that can be around the model. `generate` is the offline call that a script would
make, one for each turn of all episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import psutil

from actors.vllm_engine import engine_arguments, set_environment
from configs.schema import RunConfig


@dataclass(frozen=True)
class Run:
    """`actor_cpu_s`: of the Python beside the engine, that is agent loop, tools and vLLM's client."""

    tokens: int = 0
    seconds: float = 0.0
    engine_cpu_s: float = 0.0
    actor_cpu_s: float = 0.0
    cached: float = 0.0  # share of prompt tokens served from the prefix cache

    def __add__(self, other: Run) -> Run:
        return Run(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.engine_cpu_s + other.engine_cpu_s,
            self.actor_cpu_s + other.actor_cpu_s,
            max(self.cached, other.cached),
        )

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / (self.engine_cpu_s + self.actor_cpu_s)


def cpu_seconds() -> tuple[float, float]:
    """Of this process and of its children (the engine, where it is one)."""
    me = psutil.Process()
    children = (child for child in me.children(recursive=True) if "EngineCor" in child.name())
    return sum(me.cpu_times()[:2]), sum(sum(child.cpu_times()[:2]) for child in children)


class Window:
    """Counts the turns that end within `seconds`, from when `warm_up` episodes have ended."""

    def __init__(self, warm_up: int, seconds: float, on_over: Callable[[], None] = lambda: None) -> None:
        self._warm_up = warm_up
        self._seconds = seconds
        self._on_over = on_over
        self._tokens = 0
        self._started: float | None = None
        self._run: Run | None = None
        if not warm_up:
            self._start()

    @property
    def over(self) -> bool:
        return self._run is not None

    def turn_ended(self, tokens: int) -> None:
        if self._started is None or self.over:
            return
        self._tokens += tokens
        if time.perf_counter() - self._started >= self._seconds:
            self.close()
            self._on_over()

    def episode_ended(self) -> None:
        self._warm_up -= 1
        if self._warm_up == 0:
            self._start()

    def close(self) -> Run:
        assert self._started is not None
        own, engine = cpu_seconds()
        seconds = time.perf_counter() - self._started
        own_s, engine_s = own - self._cpu[0], engine - self._cpu[1]
        self._run = Run(self._tokens, seconds, engine_s, own_s)
        return self._run

    def run(self) -> Run:
        assert self._run is not None
        return self._run

    def _start(self) -> None:
        self._started, self._cpu = time.perf_counter(), cpu_seconds()


@dataclass(frozen=True)
class Script:
    """An episode to repeat: its prompt, the tokens sampled in each turn, and what came between the turns."""

    prompt: list[int]
    lengths: list[int]
    observations: list[list[int]]


def serve(config: RunConfig, model: Path, orders: Any) -> None:
    """Obeys (verb, arguments …) from the pipe until it is killed."""
    set_environment("cpu", 1)
    from vllm import LLM

    alone = Alone(LLM(**engine_arguments(config, model, "cpu", 0)), config.actors.temperature)
    while True:
        verb, *arguments = orders.recv()
        orders.send(getattr(alone, verb)(*arguments))


class Alone:
    def __init__(self, llm: Any, temperature: float) -> None:
        self._llm = llm
        self._temperature = temperature
        self._numbers = count()

    def refilled(self, scripts: Sequence[Script], in_flight: int, seconds: float) -> Run:
        window = Window(in_flight, seconds)
        engine = self._llm.llm_engine
        running: dict[str, Playing] = {}
        waiting = _play(scripts)
        while not window.over:
            while len(running) < in_flight:
                playing = next(waiting)
                running[self._add(playing)] = playing
            for output in engine.step():
                if not output.finished:
                    continue
                playing = running.pop(output.request_id)
                sampled = output.outputs[0].token_ids
                if playing.go_on(sampled):
                    running[self._add(playing)] = playing
                else:
                    window.episode_ended()
                window.turn_ended(len(sampled))
        engine.abort_request(list(running))
        while engine.has_unfinished_requests():
            engine.step()
        return _all_in_one_process(window.run())

    def generate(self, scripts: Sequence[Script]) -> Run:
        window = Window(0, float("inf"))
        playing = [Playing(script) for script in scripts]
        while playing:
            prompts: list[Any] = [{"prompt_token_ids": each.ids} for each in playing]
            outputs = self._llm.generate(prompts, [self._sampling(each) for each in playing], use_tqdm=False)
            for output in outputs:
                window.turn_ended(len(output.outputs[0].token_ids))
            playing = [
                each
                for each, output in zip(playing, outputs, strict=True)
                if each.go_on(output.outputs[0].token_ids)
            ]
        return _all_in_one_process(window.close())

    def _add(self, playing: Playing) -> str:
        """The name that its output will have; vLLM returns another."""
        name = str(next(self._numbers))
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": playing.ids}, self._sampling(playing))
        return name

    def _sampling(self, playing: Playing) -> Any:
        """Whatever makes it fast, but for the logprobs, which are needed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self._temperature,
            max_tokens=playing.length,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class Playing:
    """A script and how far it has got."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._turn = 0
        self.ids = list(script.prompt)

    @property
    def length(self) -> int:
        return self._script.lengths[self._turn]

    def go_on(self, sampled: Sequence[int]) -> bool:
        """After a turn: is there another?"""
        if self._turn == len(self._script.observations):
            return False
        self.ids = [*self.ids, *sampled, *self._script.observations[self._turn]]
        self._turn += 1
        return True


def _play(scripts: Sequence[Script]) -> Iterator[Playing]:
    return (Playing(script) for script in cycle(scripts))


def _all_in_one_process(run: Run) -> Run:
    return Run(run.tokens, run.seconds, run.engine_cpu_s + run.actor_cpu_s)
