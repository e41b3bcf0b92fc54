"""How advantage estimators and policy losses do on the calculator: success on held-out prompts after N steps.

    python benchmarks/estimators.py [--steps 20] [--estimators grpo,rloo] [--losses ppo,cispo] [--seed 0]

One training run of the recipe for each pair, one seed each: differences of a few points are noise (the table
has 95 % intervals). Heavy: a run takes minutes. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
ESTIMATORS = "grpo,dr_grpo,rloo,maxrl,reinforce_plus_plus,reinforce_plus_plus_baseline,gae"
LOSSES = "ppo,gspo,cispo,sapo,dppo"


def train(name: str, settings: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe unless it has run; the evaluation after it."""
    folder = Path(options.runs) / name
    if not (folder / "eval" / "after.json").exists():
        resume = ["--resume", str(folder)] if (folder / "config.toml").exists() else []
        new = ["--config", options.config, "--launch.runs_dir", options.runs, "--name", name, *settings]
        command = [sys.executable, str(ROOT / "launch.py"), *(resume or new)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"{name} failed; read {folder / 'logs'}")
    return {when: json.loads((folder / "eval" / f"{when}.json").read_text()) for when in ("before", "after")}


def cell(result: dict[str, Any]) -> str:
    sampled = result["sampled"]
    return f"{sampled['success']:.1%} ({sampled['low']:.1%} – {sampled['high']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "calculator_cpu.toml"))
    parser.add_argument("--runs", default="runs/estimators")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--estimators", default=ESTIMATORS)
    parser.add_argument("--losses", default=LOSSES)
    options = parser.parse_args()
    estimators, losses = options.estimators.split(","), options.losses.split(",")
    found, before = {}, ""
    for estimator, loss in itertools.product(estimators, losses):
        settings = ["--steps", str(options.steps), "--seed", str(options.seed)]
        settings += ["--learner.adv_estimator", estimator, "--learner.policy_loss", loss]
        result = train(f"{estimator}-{loss}-{options.steps}-{options.seed}", settings, options)
        before, found[estimator, loss] = cell(result["before"]), cell(result["after"])
    table = Table("estimator", *losses, title=f"before: {before}; after {options.steps} steps:")
    for estimator in estimators:
        table.add_row(estimator, *(found[estimator, loss] for loss in losses))
    Console().print(table)


if __name__ == "__main__":
    main()
