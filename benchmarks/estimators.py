"""How advantage estimators and policy losses do on the calculator: success on held-out prompts after N steps.

    python benchmarks/estimators.py [--steps 8] [--pairs grpo:ppo,rloo:cispo] [--seed 0]
    python benchmarks/estimators.py --pairs all         # every estimator with every loss: hours on a CPU
    python benchmarks/estimators.py --table             # what has run so far

One training run of the recipe for each pair, one seed each: differences of a few points are noise (the table
has 95 % intervals). Two minibatches a step, since with one update every loss is the same policy gradient;
each loss has the bounds of its paper's preset. A run takes minutes; one that is there is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from configs.presets import PRESETS

ROOT = Path(__file__).parents[1]
ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
)
LOSSES = ("ppo", "gspo", "cispo", "sapo", "dppo")
DIAGONAL = (  # each estimator and each loss at least once
    "grpo:ppo,dr_grpo:dppo,rloo:cispo,maxrl:sapo,reinforce_plus_plus_baseline:gspo,reinforce_plus_plus:ppo,gae:ppo"
)
BEFORE = "before"


def run(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def evaluate(model: str, name: str, options: argparse.Namespace) -> None:
    """Success on held-out prompts, greedy and sampled, into `name`.json; nothing if it is there."""
    out = Path(options.runs) / f"{name}.json"
    if not out.exists():
        held_out = ["--eval.prompts", str(options.prompts)]
        run(["eval", "--config", options.config, "--model", model, "--out", str(out), *held_out])


def train(pair: str, options: argparse.Namespace) -> None:
    """Run the recipe with this pair unless it has run, and evaluate what it exports."""
    name, (estimator, loss) = name_of(pair, options), pair.split(":")
    folder = Path(options.runs) / name
    if not (folder / "export").exists():
        settings = {"adv_estimator": estimator, "policy_loss": loss, "minibatches": "2"}
        bounds = {
            key: str(value) for key, value in PRESETS[loss].items() if key.startswith(("clip_", "sapo_"))
        }
        dotted = [word for key, value in (settings | bounds).items() for word in (f"--learner.{key}", value)]
        new = ["--config", options.config, "--launch.runs_dir", options.runs, "--name", name, *dotted]
        new += ["--steps", str(options.steps), "--seed", str(options.seed)]
        new += ["--eval.before_and_after", "false"]
        run(["--resume", str(folder)] if (folder / "config.toml").exists() else new)
    evaluate(str(folder / "export"), name, options)


def name_of(pair: str, options: argparse.Namespace) -> str:
    return f"{pair.replace(':', '-')}-{options.steps}-{options.seed}"


def table(pairs: list[str], options: argparse.Namespace) -> Table:
    made = Table("estimator", "policy loss", "success, sampled", "success, greedy")
    for pair in (BEFORE, *pairs):
        path = Path(options.runs) / f"{BEFORE if pair == BEFORE else name_of(pair, options)}.json"
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text())
            estimator, _, loss = pair.partition(":")
            made.add_row(estimator, loss, *(interval(result[decoding]) for decoding in ("sampled", "greedy")))
    made.title = f"calculator, {options.steps} steps, seed {options.seed}, {options.prompts} held-out prompts"
    return made


def interval(success: dict[str, Any]) -> str:
    return f"{success['success']:.1%} ({success['low']:.1%} – {success['high']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "calculator_cpu.toml"))
    parser.add_argument("--runs", default="runs/estimators")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--pairs", default=DIAGONAL, help="estimator:loss, by commas; or all")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    whole = [":".join(pair) for pair in itertools.product(ESTIMATORS, LOSSES)]
    pairs = whole if options.pairs == "all" else options.pairs.split(",")
    if unknown := set(pairs) - set(whole):
        raise SystemExit(
            f"no such pair: {', '.join(sorted(unknown))}; an estimator is one of "
            f"{', '.join(ESTIMATORS)}, a loss one of {', '.join(LOSSES)}"
        )
    if not options.table:
        evaluate("smollm2-135m-instruct", BEFORE, options)
        for pair in pairs:
            train(pair, options)
    Console().print(table(pairs, options))


if __name__ == "__main__":
    main()
