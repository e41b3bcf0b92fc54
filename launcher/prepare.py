"""From a config to a run that can start: every check that needs no model, then the run folder.

Invariant: nothing is written to a run folder before all checks have passed, and a folder that has a
run in it is only touched by resuming that run. Called by `launcher.train` and `launcher.commands`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import LoadedConfig, dump_toml
from configs.roles import RoleSpec
from configs.run_folder import CurveKeys, RunFolder
from configs.schema import RunConfig
from launcher.preflight import (
    PreflightError,
    Resources,
    check_learner,
    check_sinks,
    choose_endpoint,
    find_gpus,
    plan_resources,
    prepare_model,
    run_module,
    usable_cores,
)
from tasks.demonstrations import check_rows
from tasks.judge import asks_served_judge
from tasks.mixture import Mixture, Part, load_mixture
from tasks.readers import read_rows
from tasks.reward import BadReward
from toolcall.errors import BadTool, ToolUnavailable

PREPARE_S = 3600.0  # of one tool: a large corpus takes a while to index


@dataclass(frozen=True)
class Run:
    """A run that can start: everything that the roles are told."""

    folder: RunFolder
    config: RunConfig
    config_dir: Path
    run_id: str
    mixture: Mixture  # rows left out are not in it any more
    model_path: Path
    resources: Resources
    endpoint: str
    keys: CurveKeys
    dropped_prompts: tuple[tuple[int, ...], ...] = ()  # of each task, rows whose prompts leave no room
    syntaxes: tuple[str, ...] = ()  # of each task, how calls are read and why, where that was found out
    demonstrations: int = 0  # rows of sft.data, which a supervised run trains in place of prompts

    def specs(self) -> list[RoleSpec]:
        """What each role is told, in order of start."""
        actors, learners = self.config.actors.count, self.config.learner.count
        return [
            self._spec("buffer", "buffer", 0, 1, threads=1),
            *(self._spec("actor", f"actor-{i}", i, 1, self.resources.actor_threads) for i in range(actors)),
            *(
                self._spec("learner", f"learner-{i}", i, learners, self.resources.learner_threads)
                for i in range(learners)
            ),
        ]

    def _spec(self, role: str, name: str, rank: int, world: int, threads: int) -> RoleSpec:
        return RoleSpec(
            role=role,  # type: ignore[arg-type]
            name=name,
            rank=rank,
            world=world,
            config=self.config,
            run_dir=self.folder.root.resolve(),
            run_id=self.run_id,
            config_dir=self.config_dir,
            model_path=self.model_path,
            num_prompts=self.demonstrations or len(self.mixture),
            shares=() if self.demonstrations else self.mixture.shares,
            num_held_out=evaluated_prompts(self.config, self.mixture),
            dropped_prompts=self.dropped_prompts,
            buffer_endpoint=self.endpoint,
            device=self.resources.device,
            threads=threads,
        )


def new_folder(config: RunConfig, now: float | None = None) -> RunFolder:
    """The folder of a new run. Raises PreflightError if there is a run in it already."""
    task = Path(config.task.data).stem if config.task.data else config.task.name.replace(":", "-")
    task = "mix" if config.task.mix else task
    name = config.launch.name or f"{task}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}"
    folder = RunFolder(Path(config.launch.runs_dir) / name)
    if folder.config.exists():
        raise PreflightError(
            f"there is a run in {folder.root} already; go on with it by --resume {folder.root}, "
            "or give another --name"
        )
    return folder


def existing_folder(path: Path) -> RunFolder:
    """The folder of a run that was started. Raises PreflightError."""
    folder = RunFolder(path)
    if not folder.config.exists() or not folder.run_info.exists():
        raise PreflightError(
            f"{path} is no run folder: it has no config.toml and run.json; name one below runs/"
        )
    return folder


def read_tasks(loaded: LoadedConfig, dropped: Sequence[Sequence[int]] = ()) -> Mixture:
    """The config's tasks, without the rows `dropped` of each. Raises PreflightError."""
    config = loaded.config
    try:
        mixture = load_mixture(config.task, loaded.config_dir, config.seed, dropped)
    except (BadTool, BadReward, ValueError, OSError) as error:
        raise PreflightError(f"the task cannot be loaded: {error}") from error
    _refuse_judge_without_server(config, mixture)
    return mixture


def _refuse_judge_without_server(config: RunConfig, mixture: Mixture) -> None:
    rewards = [reward for part in mixture.parts for reward in part.task.rewards]
    name = next((reward.name for reward in rewards if asks_served_judge(reward)), None)
    if name is not None and not config.judge.serve:
        raise PreflightError(
            f'reward {name!r} has endpoint = "served", but no model is served; set judge.serve to its '
            "folder, or give the endpoint of a server that runs"
        )
    if config.judge.serve and config.launch.ray_address:
        raise PreflightError(
            "judge.serve starts a server on GPUs of this machine, which launch.ray_address gives to its "
            "cluster; start the judge's server yourself and name its endpoint in the reward's options"
        )


def prepare_tools(mixture: Mixture) -> list[str]:
    """Let tools build or check what they need; a line for each. Raises PreflightError."""
    said = []
    for tool in (tool for part in mixture.parts for tool in part.task.tools):
        if tool.prepare is not None:
            try:
                said.append(f"tool {tool.name}: {asyncio.run(_prepare(tool.prepare))}")
            except (ToolUnavailable, TimeoutError, ValueError, OSError) as error:
                raise PreflightError(f"tool {tool.name!r} cannot be used: {error}") from error
    return said


async def _prepare(prepare: Callable[[], Awaitable[str]]) -> str:
    async with asyncio.timeout(PREPARE_S):
        return await prepare()


def evaluated_prompts(config: RunConfig, mixture: Mixture) -> int:
    """Held-out prompts of an evaluation during training, 0 without any. Raises PreflightError."""
    if config.eval.every_steps == 0:
        return 0
    prompts = len(mixture.held_out(config.eval.every_prompts))
    if prompts == 0:
        raise PreflightError(
            f"eval.every_steps = {config.eval.every_steps} asks for evaluations, but the task has no "
            "held-out rows; raise task.held_out, or set eval.every_steps = 0"
        )
    return prompts


def count_demonstrations(loaded: LoadedConfig) -> int:
    """How many rows `sft.data` has. Raises PreflightError for a file or row that cannot be used."""
    assert loaded.config.sft.data is not None
    try:
        rows = read_rows(loaded.config.sft.data, loaded.config_dir)
        check_rows(rows)
    except (ValueError, OSError) as error:
        raise PreflightError(str(error).replace("task.data:", "sft.data:")) from error
    return len(rows)


def check_rewards(config: RunConfig, mixture: Mixture) -> None:
    """Raises PreflightError for a penalty under an estimator that wants none."""
    if config.learner.adv_estimator != "maxrl":
        return
    for task in (part.task for part in mixture.parts):
        for reward in task.rewards:
            if reward.weight < 0:
                raise PreflightError(
                    "learner.adv_estimator = 'maxrl' reads rewards as probabilities of success, and "
                    f"{reward.name!r} of {task.name} has weight {reward.weight:g}; give it 0 or more, or "
                    "choose grpo"
                )


def plan(config: RunConfig) -> Resources:
    return plan_resources(config, usable_cores(), find_gpus())


def prepare_run(loaded: LoadedConfig, folder: RunFolder) -> Run:
    """All checks, cheap ones first; then write the run folder. Call with the folder's lock held."""
    config = loaded.config
    check_sinks(config)
    resources = plan(config)
    check_learner(config, resources.device)
    endpoint = choose_endpoint(config)
    mixture = read_tasks(loaded)
    check_rewards(config, mixture)
    evaluated_prompts(config, mixture)
    demonstrations = count_demonstrations(loaded) if config.sft.data else 0
    for line in prepare_tools(mixture):
        print(line, file=sys.stderr)
    model_path = prepare_model(config.model.path)
    dropped, syntaxes = measure_prompts(loaded, mixture, model_path)
    if any(dropped):
        mixture = read_tasks(loaded, dropped)
    return Run(
        folder=folder,
        config=config,
        config_dir=loaded.config_dir,
        run_id=_write(folder, loaded, endpoint),
        mixture=mixture,
        model_path=model_path,
        resources=resources,
        endpoint=endpoint,
        keys=folder.create_keys(),
        dropped_prompts=dropped,
        syntaxes=syntaxes,
        demonstrations=demonstrations,
    )


def measure_prompts(
    loaded: LoadedConfig, mixture: Mixture, model_path: Path
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Of each task the training rows to leave out, by `task.long_prompts`, and its call syntax. Raises
    PreflightError where it says refuse, if none would be left, or if model and tools do not fit together.
    A made task knows its own prompts; one that names its parser too is not measured."""
    if not any(part.limits.data or part.task.parser is None for part in mixture.parts):
        return (), ()
    arguments = ["--config", str(loaded.source), "--model", str(model_path), *loaded.overrides]
    answer = json.loads(run_module("actors.prompt_lengths", arguments, "measuring the prompts"))
    dropped = tuple(tuple(rows) for rows in answer["too_long"])
    for part, rows in zip(mixture.parts, dropped, strict=True):
        _refuse_long_prompts(part, rows)
    return dropped, tuple(answer["syntaxes"])


def _refuse_long_prompts(part: Part, found: Sequence[int]) -> None:
    task, limits = part.task, part.limits
    count = f"{len(found)} of {len(task.train)} training prompts of {task.name}"
    room = f"task.max_trajectory_tokens = {limits.max_trajectory_tokens}"
    if found and limits.long_prompts == "refuse":
        first = task.make_messages(task.train[found[0]])[-1]["content"]
        raise PreflightError(
            f"{count} leave no room to answer within {room}, the first begins {str(first)[:60]!r}; "
            'raise it, or set task.long_prompts = "drop"'
        )
    if len(found) == len(task.train):
        raise PreflightError(f"{count} leave no room to answer within {room}; raise it")


def _write(folder: RunFolder, loaded: LoadedConfig, endpoint: str) -> str:
    """Write what the folder says about its run; the run's id, which a resumed run keeps."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    if folder.run_info.exists():
        run_id = json.loads(folder.run_info.read_text(encoding="utf-8"))["run_id"]
    else:
        run_id = uuid.uuid4().hex[:12]
    info = {"run_id": run_id, "config_dir": str(loaded.config_dir)}
    folder.run_info.write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    folder.config.write_text(dump_toml(loaded.config), encoding="utf-8")
    folder.endpoint.write_text(endpoint + "\n", encoding="utf-8")
    return run_id
