"""An evaluation's result as tables for the terminal. Called by the evaluator and `launch.py eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

DECODINGS = ("greedy", "sampled")


def tables(result: dict[str, Any]) -> Iterator[Table]:
    yield _success(result)
    for name, part in result.get("tasks", {}).items():
        yield _success({"task": name, "model": result["model"], **part})
    yield _details(result)
    if used := result.get("judge"):
        yield _used(used)
    if "against" in result:
        yield _against(result["against"])


def _success(result: dict[str, Any]) -> Table:
    table = Table(title=escape(f"{result['task']}: {result['model']}"), title_justify="left")
    for column in ("decoding", "success (95 % interval)", "pass@k", "prompts", "samples", "unscored"):
        table.add_column(column)
    for decoding in DECODINGS:
        part = result[decoding]
        ks = (f"pass@{k} {e['mean']:.1%}" for k, e in part["pass_at_k"].items() if int(k) > 1)
        table.add_row(
            _name(decoding, part),
            _percent({"mean": part["success"], **part}),
            ", ".join(ks) or "–",
            str(part["n"]),
            str(part["samples"]),
            str(part["unscored"]),
        )
    return table


def _details(result: dict[str, Any]) -> Table:
    table = Table("decoding", "what", "mean (95 % interval)", title="details", title_justify="left")
    for decoding in DECODINGS:
        part = result[decoding]
        rows = [("reward", _number(part["reward"]))]
        rows += [(f"component {name}", _number(e)) for name, e in part["components"].items()]
        rows += [(f"ended by {reason}", _ended(it)) for reason, it in part["stop_reasons"].items()]
        rows += [(f"unscored: {count}", reason) for reason, count in part["errors"].items()]
        if len(part["seeds"]) > 1:
            rows += [(f"seed {seed}", f"success {mean:.1%}") for seed, mean in part["seeds"].items()]
        for number, row in enumerate(rows):
            table.add_row(_name(decoding, part) if number == 0 else "", *map(escape, row))
        table.add_section()
    return table


def _used(used: dict[str, float]) -> Table:
    table = Table(title="what judging took", title_justify="left", show_header=False)
    for name, value in sorted(used.items()):
        table.add_row(name, f"{value:,.6g}")
    return table


def _against(against: dict[str, Any]) -> Table:
    table = Table(title=escape(f"difference to {against['file']}, paired by prompt"), title_justify="left")
    for column in ("decoding", "success", "reward", "prompts"):
        table.add_column(column)
    for decoding in DECODINGS:
        if decoding in against:
            part = against[decoding]
            success = _signed(part["success"], ".1%")
            table.add_row(decoding, success, _signed(part["reward"], ".3f"), str(part["success"]["n"]))
    return table


def _name(decoding: str, part: dict[str, Any]) -> str:
    return decoding if decoding == "greedy" else f"sampled, T = {part['temperature']:g}"


def _ended(samples: dict[str, Any]) -> str:
    success = samples["success"]
    return f"{samples['count']} samples, " + ("none scored" if success is None else f"success {success:.1%}")


def _percent(estimate: dict[str, Any]) -> str:
    if not estimate["n"]:
        return "nothing scored"
    return f"{estimate['mean']:.1%} ({estimate['low']:.1%} – {estimate['high']:.1%})"


def _number(estimate: dict[str, Any]) -> str:
    if not estimate["n"]:
        return "nothing scored"
    return f"{estimate['mean']:.3f} ({estimate['low']:.3f} – {estimate['high']:.3f})"


def _signed(estimate: dict[str, Any], form: str) -> str:
    return f"{estimate['mean']:+{form}} ({estimate['low']:+{form}} – {estimate['high']:+{form}})"
