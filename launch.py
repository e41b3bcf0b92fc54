"""The command line of Slipstream: `python launch.py --help`.

Thin on purpose: what the commands do is in `launcher.commands`. Without a command it trains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from configs.keys import nearest
from configs.load import ConfigError
from launcher import commands
from launcher.evaluation import EvaluationFailed
from launcher.preflight import PreflightError

DEFAULT_COMMAND = "train"
_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}  # any dotted config key is an option


class _DefaultsToTraining(TyperGroup):
    """Options without a command are `train`'s; a mistyped command is answered with the nearest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = [DEFAULT_COMMAND, *args]
        elif not args[0].startswith("-") and args[0] not in self.commands:
            guess = nearest(args[0], self.commands)
            mend = f"did you mean {guess}" if guess else f"there are {', '.join(self.commands)}"
            print(f"error: unknown command {args[0]!r}; {mend}", file=sys.stderr)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultsToTraining,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train a language model to use tools over many turns by asynchronous reinforcement learning.",
    epilog=(
        "Any config key is an option: `--learner.lr 2e-6`, `--task.options.syntax hermes`, "
        '`--launch.sinks \'["jsonl", "wandb"]\'`. Short: `--actors N`, `--learners N`, `--steps N`, '
        "`--seed N`, `--name NAME`, `--ray-address HOST:PORT`. All keys: `python launch.py check --keys`."
    ),
)

Config = Annotated[Path | None, typer.Option(help="A recipe (TOML). Default: configs/calculator_cpu.toml.")]


@app.command(context_settings=_OVERRIDES)
def train(
    context: typer.Context,
    config: Config = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to go on with, e.g. runs/x.")] = None,
) -> None:
    """Train (the command when none is given).

    `python launch.py`: the CPU recipe, a 135M model learns to use a calculator

    `python launch.py --config my_task.toml --actors 4 --learners 4`

    `python launch.py --resume runs/x --steps 200`
    """
    _run(lambda: commands.train(config, resume, context.args))


@app.command(context_settings=_OVERRIDES)
def sft(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="JSONL: chats with `messages`, or exported trajectories.")],
    config: Config = None,
) -> None:
    """Learn from demonstrations, for a model that cannot call the tools yet.

    `python launch.py sft --config my_task.toml --data chats.jsonl --steps 50 --learner.lr 1e-5`
    """
    _run(lambda: commands.sft(config, data, context.args))


@app.command(name="export-trajectories")
def export_trajectories(
    run: Annotated[Path, typer.Option(help="The run folder, e.g. runs/x.")],
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")] = Path("demonstrations.jsonl"),
    min_reward: Annotated[float, typer.Option(help="The least reward.")] = 1.0,
    per_prompt: Annotated[int | None, typer.Option(help="At most so many of one prompt.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many in all.")] = None,
) -> None:
    """Write a run's best trajectories as demonstrations for `sft`.

    `python launch.py export-trajectories --run runs/x --min-reward 1 --per-prompt 2`
    """
    _run(lambda: commands.export_trajectories(run, out, min_reward, per_prompt, limit))


@app.command(context_settings=_OVERRIDES)
def check(
    context: typer.Context,
    config: Config = None,
    keys: Annotated[bool, typer.Option("--keys", help="List all config keys, or those with a WORD.")] = False,
) -> None:
    """Preflight without training: the resolved config, the tools, one prompt with its mask.

    `python launch.py check --config my_task.toml`

    `python launch.py check --keys staleness`
    """
    if keys:
        _run(lambda: commands.keys(" ".join(context.args)))
    _run(lambda: commands.check(config, context.args))


@app.command(context_settings=_OVERRIDES)
def tools(context: typer.Context, config: Config = None) -> None:
    """The tools that the model is offered, with their schemas; `call` tries one as a run would.

    `python launch.py tools --config my_task.toml`

    `python launch.py tools call search '{"query": "cats"}' --config my_task.toml`
    """
    _run(lambda: commands.tools(config, context.args))


@app.command(name="eval", context_settings=_OVERRIDES)
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A model folder, e.g. runs/x/export, or http://host:8000/v1.")],
    config: Annotated[Path | None, typer.Option(help="A recipe. Default: the model's run's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Result, with samples as .jsonl; goes on there.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another evaluation's .jsonl: the difference.")] = None,
) -> None:
    """Success on held-out prompts, greedy and sampled, with 95 % intervals.

    `python launch.py eval --model runs/x/export --eval.prompts 512`

    `python launch.py eval --model runs/x/export --eval.samples 8 --eval.seeds '[0, 1]'`

    `python launch.py eval --model runs/x/export --against runs/x/eval/before.jsonl`
    """
    _run(lambda: commands.evaluate(config, model, out, against, context.args))


@app.command(context_settings=_OVERRIDES)
def chat(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A model folder or http://host:8000/v1.")] = None,
    config: Config = None,
) -> None:
    """Talk to a model with the task's tools, seeing its calls and their results.

    `python launch.py chat --model runs/x/export`
    """
    _run(lambda: commands.chat(config, model, context.args))


@app.command(name="new-task")
def new_task(name: Annotated[str, typer.Argument(help="Of the task, its folder and its module.")]) -> None:
    """A folder with a small task that runs, its data, recipe and test, to change into your own.

    `python launch.py new-task my_task`
    """
    _run(lambda: commands.new_task(name))


@app.command(context_settings=_OVERRIDES)
def calibrate(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="Rows with response and score (0 to 1) beside the task's own.")],
    config: Config = None,
    reward: Annotated[str | None, typer.Option(help="Its name. Default: the task's first judge.")] = None,
) -> None:
    """A judge's values beside people's scores: agreement, correlation, tokens, cost.

    `python launch.py calibrate --config my_task.toml --data calibration.jsonl`
    """
    _run(lambda: commands.calibrate(config, data, reward, context.args))


@app.command()
def status(run: Annotated[Path, typer.Option(help="The run folder, e.g. runs/x.")]) -> None:
    """What a running run is doing: roles, weight versions, leases, ledger, rates, who waits for whom."""
    _run(lambda: commands.status(run))


@app.command()
def scale(
    run: Annotated[Path, typer.Option(help="The run folder, e.g. runs/x.")],
    actors: Annotated[int, typer.Option(min=1, help="How many actors the run shall have.")],
) -> None:
    """More or fewer actors while a run goes on; those that go finish their leases first.

    `python launch.py scale --run runs/x --actors 8`
    """
    _run(lambda: commands.scale(run, actors))


@app.command()
def show(
    run: Annotated[Path, typer.Option(help="The run folder, e.g. runs/x.")],
    trajectory: Annotated[str | None, typer.Option(help="Its id. Default: the newest with a call.")] = None,
) -> None:
    """One trajectory token by token: id, text, action mask, weight version, logprob."""
    _run(lambda: commands.show(run, trajectory))


def _run(command: Callable[[], int]) -> None:
    """Errors that the user can mend are one line; anything else is a bug and shows its traceback."""
    try:
        code = command()
    except (ConfigError, PreflightError, EvaluationFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
