"""What the learner's layouts, LM head and step cost, beside a padded batch and the floor of plain rows.

    python benchmarks/learner.py [--run runs/x | --like search] [--parts layouts,prefix,head,step,loop]

The trajectories are those of a run's buffer (its real lengths), or made up like a shipped task's. Times are
CPU seconds of this process on one thread (other processes do not count), the best of `--repeat`; every ratio
is of two figures of this run. Memory is the peak of the process above what it held before. `loop` reads what
the learner of a whole run recorded (`--run`), wall seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.learner_batches import like, made_up, of_run, uneven
from buffer.messages import Batch
from configs.schema import LearnerConfig, RunConfig
from learner import attention
from learner.batch import BatchSettings, plan
from learner.logprobs import logprobs_and_entropy
from learner.memory import trim
from learner.packaged_model import PACKAGED_NAME, prepare
from learner.policy import Policy, load_policy
from metrics import names

CPU = torch.device("cpu")


# --- measuring ------------------------------------------------------------------------------------


def measured(work: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """(CPU seconds of the fastest of `repeat` calls, what the last one returned)."""
    times, result = [], None
    for _ in range(repeat):
        started = time.process_time()
        result = work()
        times.append(time.process_time() - started)
    return min(times), result


def peak_gib(work: Callable[[], Any]) -> float:
    """The most that `work` held above what was held before. Linux resets the peak on request."""
    trim()  # else what was freed earlier would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 2**20


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def settings(policy: Policy, **learner: Any) -> BatchSettings:
    config = LearnerConfig.model_validate({"tokens_per_microbatch": 8192} | learner)
    return BatchSettings(config, 64, 1, policy.hf.config.hidden_size)


# --- layouts --------------------------------------------------------------------------------------


def packed(policy: Policy, batch: Batch, shared: bool) -> int:
    """Forward and backward as the learner does it; the tokens computed."""
    made = plan(batch, settings(policy, shared_prefix=shared))
    for micro in made.updates[0].ranks[0]:
        row = policy.row(micro, CPU)
        (row.weights * row.advantages * policy(row)[0]).sum().backward()
    return made.tokens_packed


def padded(policy: Policy, batch: Batch, rows: int = 8) -> int:
    """The usual batch: `rows` trajectories padded to the longest, logits of action tokens only."""
    everyone = [t for group in batch.groups for t in group]
    computed = 0
    for start in range(0, len(everyone), rows):
        some = everyone[start : start + rows]
        longest = max(len(t.token_ids) for t in some)
        ids, seen = torch.zeros(len(some), longest, dtype=torch.int64), torch.zeros(len(some), longest)
        targets, states_of = [], []
        for i, t in enumerate(some):
            ids[i, : len(t.token_ids)] = torch.from_numpy(t.token_ids.astype(np.int64))
            seen[i, : len(t.token_ids)] = 1
            at = np.flatnonzero(t.action_mask)
            targets.append(ids[i, at])
            states_of.append(torch.from_numpy(i * longest + at - 1))
        hidden = policy.hf.base_model(input_ids=ids, attention_mask=seen, use_cache=False).last_hidden_state
        states = hidden.flatten(0, 1)[torch.cat(states_of)]
        head: Any = policy.hf.get_output_embeddings()
        head(states, torch.cat(targets))[0].sum().backward()
        computed += ids.numel()
    return computed


def full_rows(policy: Policy, rows: int, length: int, targets: int) -> int:
    """The floor: plain causal rows that are all equally long, with `targets` logits each."""
    ids = torch.randint(100, 40_000, (rows, length))
    hidden = policy.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head: Any = policy.hf.get_output_embeddings()
    head(hidden[:, :targets].flatten(0, 1), ids[:, :targets].flatten())[0].sum().backward()
    return ids.numel()


def layouts(console: Console, folder: Path, batch: Batch, repeat: int) -> None:
    tree = load(folder, attention.NAME)
    plain = load(folder, "sdpa")
    count = sum(map(len, batch.groups))
    trained = sum(int(t.action_mask.sum()) for group in batch.groups for t in group)
    length = max(len(t.token_ids) for group in batch.groups for t in group)
    table = Table("layout", "tokens", "CPU s", "trajectories/s", "trained tok/s", "computed tok/s", "speed")
    base = 0.0
    for name, work in (
        ("padded to the longest of 8", lambda: padded(plain, batch)),
        ("packed", lambda: packed(tree, batch, shared=False)),
        ("packed, prompts shared", lambda: packed(tree, batch, shared=True)),
        ("floor: 8 rows without padding", lambda: full_rows(plain, 8, length, trained // count)),
    ):
        seconds, tokens = measured(work, repeat)
        base = base or seconds
        is_floor = name.startswith("floor")
        table.add_row(
            name,
            f"{tokens:,}",
            f"{seconds:.2f}",
            "" if is_floor else f"{count / seconds:.2f}",
            "" if is_floor else f"{trained / seconds:.1f}",
            f"{tokens / seconds:.0f}",
            "" if is_floor else f"{base / seconds:.2f}x",
        )
    members = count // len(batch.groups)
    shapes = f"{len(batch.groups)} groups of {members}, {trained / count:.1f} trained tokens each"
    console.print(f"layouts: forward and backward of {shapes}")
    console.print(table)


def prefix(console: Console, folder: Path, repeat: int) -> None:
    """The claim: prompts of 300 tokens, 8 continuations of 30, at least 3 times the trajectories/s."""
    policy = load(folder, attention.NAME)
    table = Table("8 continuations of 30 after 300", "tokens", "CPU s", "trajectories/s", "ratio")
    one, two = made_up(1, 8, shared=0, rest=30), made_up(2, 8, shared=250, rest=30)
    base = 0.0
    for name, batch, shared in (
        ("each with its prompt", one, False),
        ("prompt once for the group", one, True),
        ("and 250 of the 300 once for both groups", two, True),
    ):
        work = lambda batch=batch, shared=shared: packed(policy, batch, shared)  # noqa: E731
        seconds, tokens = measured(work, repeat)
        rate = 8 * len(batch.groups) / seconds
        base = base or rate
        table.add_row(name, f"{tokens:,}", f"{seconds:.2f}", f"{rate:.2f}", f"{rate / base:.2f}x")
    console.print(table)


# --- LM head --------------------------------------------------------------------------------------


def head(console: Console, folder: Path, repeat: int, count: int) -> None:
    """Logprobs of `count` tokens and their gradients, plain and in chunks."""
    policy = load(folder, attention.NAME)
    weight = policy.hf.get_input_embeddings().weight.detach().clone().requires_grad_()  # pyright: ignore
    hidden = torch.randn(count, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    targets = torch.randint(0, weight.shape[0], (count,))

    def plain() -> Tensor:
        return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, targets[:, None]).sum()

    def chunked() -> Tensor:
        return logprobs_and_entropy(hidden, weight, targets, 1.0)[0].sum()

    table = Table(f"logprobs of {count:,} tokens, with gradients", "peak GiB", "CPU s", "memory", "time")
    base: tuple[float, float] | None = None
    for name, work in (("plain: [T, V] float32", plain), ("in chunks", chunked)):
        peak = peak_gib(lambda work=work: work().backward())
        seconds, _ = measured(lambda work=work: work().backward(), repeat)
        base = base or (peak, seconds)
        table.add_row(
            name, f"{peak:.2f}", f"{seconds:.1f}", f"1/{base[0] / peak:.1f}", f"{seconds / base[1]:.2f}x"
        )
    console.print(table)


# --- the step -------------------------------------------------------------------------------------


def step(console: Console, folder: Path, batch: Batch, repeat: int) -> None:
    """What a whole step takes beyond forward, backward and optimizer."""
    from launcher.preflight import free_port
    from learner.deepspeed_engine import join_group
    from learner.trainer import Trainer

    join_group(0, 1, f"127.0.0.1:{free_port('127.0.0.1')}", "cpu", 60)
    trainer = Trainer(RunConfig(), folder, rank=0, world=1, device="cpu")
    inside = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.process_time()
            result = work(*arguments)
            inside[name] += time.process_time() - started
            return result

        return call

    trainer.train_step(batch)  # warms up
    trainer.engine.forward = timed("forward", trainer.engine.forward)
    trainer.engine.backward = timed("backward", trainer.engine.backward)
    trainer.engine.step = timed("optimizer", trainer.engine.step)
    total = 0.0
    for number in range(repeat):
        started = time.process_time()
        trainer.train_step(dataclasses.replace(batch, step=number + 2))
        total += time.process_time() - started
    table = Table("part of a step", "CPU s", "share")
    for name, seconds in (inside | {"everything else": total - sum(inside.values())}).items():
        table.add_row(name, f"{seconds / repeat:.3f}", f"{seconds / total:.1%}")
    console.print(table)


def loop(console: Console, run: Path) -> None:
    """What the steps of a whole run took beyond `train_step`, by the learner's own clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if names.STEP_S in line["metrics"]]
    total, waited, trained, published = (
        sum(step[name] for step in steps)
        for name in (names.STEP_S, names.WAIT_S, names.TRAIN_S, names.PUBLISH_S)
    )
    table = Table(f"{len(steps)} steps of {run.name}", "wall s a step", "share of the step without waiting")
    for what, seconds in (
        ("waiting for a batch", waited),
        ("training", trained),
        ("copying the weights to publish", published),
        ("commit, checkpoint's copy, trimming memory", total - waited - trained - published),
    ):
        share = "" if seconds == waited else f"{seconds / (total - waited):.1%}"
        table.add_row(what, f"{seconds / len(steps):.2f}", share)
    console.print(table)


def balance(console: Console, folder: Path, batch: Batch) -> None:
    """How evenly the cost lies on the ranks: what the dearest has beyond the mean, the others' idle time."""
    policy = load(folder, attention.NAME)
    table = Table("ranks", "micro-batches each", "dearest beyond mean", "by count instead", "padding")
    for world in (2, 4, 8):
        made = plan(batch, dataclasses.replace(settings(policy, tokens_per_microbatch=2048), world=world))
        lengths = [sum(len(t.token_ids) for t in group) for group in batch.groups]
        by_count = [sum(lengths[rank::world]) for rank in range(world)]
        uneven = max(by_count) / (sum(by_count) / world) - 1
        each = str(len(made.updates[0].ranks[0]))
        table.add_row(str(world), each, f"{made.imbalance:.1%}", f"{uneven:.1%}", "0 tokens")
    console.print(table)


def load(folder: Path, attention_name: str) -> Policy:
    return load_policy(folder, dtype="bfloat16", attention_name=attention_name, temperature=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=PACKAGED_NAME, help="a Hugging Face folder or the packaged model")
    parser.add_argument("--run", type=Path, help="take the trajectories of this run's buffer")
    parser.add_argument("--like", default="calculator", choices=("calculator", "search"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--head-tokens", type=int, default=16_384, help="plain needs 0.6 GiB per 1,024")
    parser.add_argument("--parts", default="layouts,prefix,head,step,balance")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    folder = prepare(options.model)

    def batch() -> Batch:
        if options.run:
            return of_run(options.run, options.groups, options.members)
        return like(options.like, options.groups, options.members)

    for part in options.parts.split(","):
        if part == "layouts":
            layouts(console, folder, batch(), options.repeat)
        elif part == "prefix":
            prefix(console, folder, options.repeat)
        elif part == "head":
            head(console, folder, options.repeat, options.head_tokens)
        elif part == "step":
            step(console, folder, batch(), options.repeat)
        elif part == "loop":
            if options.run is None:
                raise SystemExit("--parts loop reads the steps of a run: name its folder by --run")
            loop(console, options.run)
        elif part == "balance":
            balance(console, folder, uneven(64, options.members))
        else:
            raise SystemExit(f"there is no part {part!r}")


if __name__ == "__main__":
    main()
