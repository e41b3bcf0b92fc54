"""The commands of `launch.py`, each a function from its options to an exit code.

Errors that the user can mend come out as `ConfigError`, `PreflightError` or `EvaluationFailed`;
`launch.py` prints them as one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.keys import Key, documented_keys
from configs.load import LoadedConfig, dump_toml, load_config
from configs.places import is_endpoint
from configs.run_folder import RunFolder
from launcher.interrupts import EXIT_STOPPED, Interrupts
from launcher.preflight import PreflightError
from launcher.tools import print_tools, read_call, try_call
from tasks.mixture import Part


def train(config: Path | None, resume: Path | None, overrides: Sequence[str]) -> int:
    from launcher.prepare import existing_folder, new_folder
    from launcher.train import train as run_training

    console = Console(file=sys.stdout)
    if resume is not None:
        if config is not None:
            raise PreflightError("--resume goes on with the run folder's own config; leave --config out")
        folder = existing_folder(resume)
        loaded = _load(folder.config, overrides, ("resume",))
    else:
        loaded = _load(config, overrides, ("config", "resume"))
        folder = new_folder(loaded.config)
    return run_training(loaded, folder, console)


def sft(config: Path | None, data: Path, overrides: Sequence[str]) -> int:
    """Train on demonstrations instead of samples: the same roles, an actor without an engine."""
    from launcher.demonstrations import sft_overrides
    from launcher.prepare import new_folder
    from launcher.train import train as run_training

    loaded = _load(config, [*sft_overrides(data), *overrides], ("config", "data"))
    return run_training(loaded, new_folder(loaded.config), Console(file=sys.stdout))


def export_trajectories(
    run: Path, out: Path, min_reward: float, per_prompt: int | None, limit: int | None
) -> int:
    """Write a run's best trajectories as demonstrations."""
    from launcher.demonstrations import export_trajectories as export
    from launcher.prepare import existing_folder

    count = export(existing_folder(run), out, min_reward, per_prompt, limit)
    print(f"{count} trajectories: {out}")
    return 0


def check(config: Path | None, overrides: Sequence[str]) -> int:
    """Everything that a run does before its first process, and what the model will be shown."""
    from actors.preview import render_preview
    from launcher.preflight import check_learner, check_sinks, prepare_model
    from launcher.prepare import plan, prepare_tools, read_tasks

    console = Console(file=sys.stdout)
    loaded = _load(config, overrides, ("config", "keys"))
    check_sinks(loaded.config)
    resources = plan(loaded.config)
    check_learner(loaded.config, resources.device)
    mixture = read_tasks(loaded)
    found = prepare_tools(mixture)
    model_path = prepare_model(loaded.config.model.path)
    _heading(console, "config")
    console.print(dump_toml(loaded.config).rstrip(), highlight=False, markup=False, soft_wrap=True)
    _heading(console, "machine")
    console.print(resources.words, highlight=False, soft_wrap=True)
    for line in found:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for part in mixture.parts:
        _show_task(console, part, len(mixture.parts) > 1)
        config_of_part = loaded.config.model_copy(update={"task": part.limits})
        _heading(console, "the first prompt, as the model and the learner see it")
        console.print(render_preview(config_of_part, part.task, model_path), soft_wrap=True)
    return 0


def tools(config: Path | None, words: Sequence[str]) -> int:
    """words: `call NAME JSON` or nothing, then dotted settings."""
    from launcher.prepare import read_tasks

    settings = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    call = read_call(words[:settings])
    parts = read_tasks(_load(config, words[settings:], ("config",))).parts
    console = Console(file=sys.stdout)
    if call is not None:
        return 0 if try_call(console, [part.task for part in parts], call) else 1
    for part in parts:
        offered = part.task.tools_of(part.task.train[0])
        if len(parts) > 1 or not offered:
            _heading(console, f"task {part.task.name}{'' if offered else ' has no tools'}")
        print_tools(console, offered)
    return 0


def keys(pattern: str) -> int:
    """Print the config keys whose name or documentation contains `pattern`."""
    console = Console(file=sys.stdout)
    found = [key for key in documented_keys() if pattern.lower() in (key.name + key.doc).lower()]
    if not found:
        raise PreflightError(f"no config key has {pattern!r} in its name or description")
    table = Table(box=None, pad_edge=False)
    for column in ("key", "default", "what it does"):
        table.add_column(column, no_wrap=column != "what it does")
    for key in found:
        table.add_row(f"--{key.name}", _default(key), f"{escape(key.doc)} [dim]({escape(key.wanted)})[/]")
    console.print(table)
    return 0


def evaluate(
    config: Path | None, model: str, out: Path | None, against: Path | None, overrides: Sequence[str]
) -> int:
    from actors.evaluation_tables import tables
    from launcher.evaluation import Evaluation
    from launcher.evaluation import evaluate as run_evaluator
    from launcher.judge_server import judge_server
    from launcher.preflight import prepare_model
    from launcher.prepare import plan, prepare_tools, read_tasks

    remote = is_endpoint(model)
    run = RunFolder(Path(model).resolve().parent)
    loaded = _load(config or _recipe_of(model), overrides, ("config", "model", "out", "against"))
    if against is not None and not against.is_file():
        raise PreflightError(f"--against: there is no file {against}; name another evaluation's .jsonl")
    resources = plan(loaded.config)
    mixture = read_tasks(loaded)
    for line in prepare_tools(mixture):
        print(line, file=sys.stderr)
    model = model if remote else str(prepare_model(model))
    label = urlsplit(model).netloc.replace(":", "-") if remote else Path(model).name
    if out is None:
        home = Path(loaded.config.launch.runs_dir) / "eval"
        home = run.eval if run.config.exists() and not remote else home
        out = home / f"{label}-{time.strftime('%m%d-%H%M%S')}.json"
    if out.suffix not in (".json", ".jsonl"):
        out = out.with_name(f"{out.name}.json")  # a dot in a model's name begins no suffix
    samples = out.with_suffix(".jsonl")
    console = Console(file=sys.stdout)
    log = out.with_suffix(".judge.log")
    with (
        Interrupts() as interrupts,
        judge_server(loaded.config, resources, log, console, interrupts),
        console.status(f"measuring {model} on held-out prompts"),
    ):
        what = Evaluation(loaded.source, model, out.with_suffix(".json"), label, overrides, against)
        result = run_evaluator(what, resources, interrupts, out.with_suffix(".log"))
    if result is None:
        console.print(
            f"stopped; the same command with --out {samples} goes on", highlight=False, soft_wrap=True
        )
        return EXIT_STOPPED
    for table in tables(result):
        console.print(table)
    console.print(f"every sample: {samples}", highlight=False, soft_wrap=True)
    return 0


def chat(config: Path | None, model: str | None, overrides: Sequence[str]) -> int:
    """Talk in this terminal to a model in a process of its own; the engine's output goes to a log."""
    from launcher.preflight import prepare_model, python_path
    from launcher.prepare import plan, read_tasks

    loaded = _load(config or (_recipe_of(model) if model else None), overrides, ("config", "model"))
    read_tasks(loaded)
    resources = plan(loaded.config)
    wanted = model or loaded.config.model.path
    found = wanted if is_endpoint(wanted) else str(prepare_model(wanted))
    log = Path(loaded.config.launch.runs_dir) / "chat.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "actors.chat", "--config", str(loaded.source), "--model", found),
        *("--device", resources.device, "--threads", str(resources.actor_threads), *overrides),
    ]
    environment = os.environ | {"PYTHONPATH": python_path(), "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("wb") as errors, Interrupts():  # Ctrl-C is for the chat, which ends its engine
        print(f"starting {found}", file=sys.stderr)
        done = subprocess.run(command, env=environment, stderr=errors, check=False)
    if done.returncode == EXIT_STOPPED:
        return EXIT_STOPPED
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise PreflightError(f"{(last or ['the chat failed'])[0].removeprefix('error: ')}; read {log}")
    return 0


def new_task(name: str) -> int:
    """Write a task that runs, and say how to go on."""
    from launcher.new_task import new_task as write

    files = write(name, Path())
    console = Console(file=sys.stdout)
    for file in files:
        console.print(str(file), highlight=False)
    recipe = f"{name}/{name}.toml"
    steps = [
        f"python -m pytest {name}",
        *(f"python launch.py {c}--config {recipe}" for c in ("check ", "chat ", "")),
    ]
    console.print("\nnext:", *steps, sep="\n  ", highlight=False, markup=False)
    return 0


def calibrate(config: Path | None, data: Path, reward: str | None, overrides: Sequence[str]) -> int:
    """A judge's values beside people's scores."""
    from launcher.judge_server import judge_server
    from launcher.prepare import plan, read_tasks
    from tasks.calibration import calibrate as ask
    from tasks.readers import BadData, read_rows

    loaded = _load(config, overrides, ("config", "data", "reward"))
    task = read_tasks(loaded).parts[0].task
    by_name = {r.name: r for r in task.rewards if not r.sees_group}
    name = reward or next((r.name for r in task.rewards if r.fn.__module__ == "tasks.judge"), None)
    if name not in by_name:
        there = ", ".join(by_name)
        raise PreflightError(f"--reward {name or ''} is not one of the task's own rewards: {there}")
    console = Console(file=sys.stdout)
    try:
        rows = read_rows(str(data), Path())
        log = Path(loaded.config.launch.runs_dir) / "judge.log"
        with (
            judge_server(loaded.config, plan(loaded.config), log, console),
            console.status(f"asking {name}"),
        ):
            result = ask(task, by_name[name], rows)
    except BadData as error:
        raise PreflightError(str(error)) from error
    table = Table(title=escape(f"{name} against people's scores"), title_justify="left", show_header=False)
    for label, value in asdict(result).items():
        if label in ("unscored", "used"):
            continue
        table.add_row(label.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    for label, value in sorted(result.used.items()):
        table.add_row(label, f"{value:,.6g}")
    for reason, count in result.unscored.items():
        table.add_row(f"unscored: {count}", escape(reason))
    console.print(table)
    return 0 if result.scored else 1


def status(run: Path) -> int:
    """What the buffer of a run says of it now."""
    from launcher.live import status as show_status

    show_status(run, Console(file=sys.stdout))
    return 0


def scale(run: Path, actors: int) -> int:
    """Another number of actors in a run that goes on."""
    from launcher.live import scale as ask_for

    return 0 if ask_for(run, actors, Console(file=sys.stdout)) else 1


def show(run: Path, trajectory_id: str | None) -> int:
    """Print one stored trajectory token by token."""
    from actors.preview import trajectory_table
    from buffer.reader import NoSuchTrajectory, read_trajectory
    from launcher.preflight import prepare_model
    from launcher.prepare import existing_folder

    folder = existing_folder(run)
    try:
        trajectory = read_trajectory(folder.store, trajectory_id)
    except NoSuchTrajectory as error:
        raise PreflightError(str(error)) from error
    model_path = prepare_model(load_config(folder.config).config.model.path)
    Console(file=sys.stdout).print(trajectory_table(trajectory, model_path))
    return 0


def _recipe_of(model: str) -> Path | None:
    """The config of the run whose export the model is: it is used as it was trained."""
    run = RunFolder(Path(model).resolve().parent)
    return run.config if not is_endpoint(model) and run.config.exists() else None


def _load(config: Path | None, overrides: Sequence[str], options: Sequence[str]) -> LoadedConfig:
    loaded = load_config(config, overrides, options)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def _show_task(console: Console, part: Part, mixed: bool) -> None:
    from launcher.train import in_words

    _heading(console, f"task {in_words(part, mixed)}")
    rewards = ", ".join(f"{r.name} (weight {r.weight:g})" for r in part.task.rewards)
    console.print("rewards: " + rewards, highlight=False)
    if part.task.offered is not None:
        console.print("tools of the first row (each row offers its own):", highlight=False)
    print_tools(console, part.task.tools_of(part.task.train[0]))


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]", highlight=False)


def _default(key: Key) -> str:
    return "–" if key.default is None else json.dumps(key.default, ensure_ascii=False).replace("[", "\\[")
