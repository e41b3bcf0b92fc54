"""An evaluation's samples: one JSON line each, and what they add up to.

Invariant: a sample that has a score is written once and never changed, so an evaluation that was stopped goes
on where it was; one drawn again, because it had no score, is a later line that replaces the earlier. A file
belongs to one evaluation, whose facts are its first line. Errors are not failures: a sample that could
not be scored counts in `unscored` and nowhere else. Called by `actors.evaluator`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from metrics.estimates import Estimate, mean_over_prompts, pass_at_k

_ERROR_CHARS = 100  # of an error's text by which samples are counted together


class BadSamples(ValueError):
    """A samples file that cannot be gone on with or compared; one sentence with the mend."""


@dataclass(frozen=True)
class Sample:
    """One rollout of a held-out prompt. `prompt` is a hash of its messages: the same in every evaluation."""

    task: str
    decoding: str  # "greedy" or "sampled"
    prompt_index: int
    prompt: str
    seed: int
    number: int  # 0 .. eval.samples - 1
    success: bool
    reward: float | None
    stop_reason: str
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    num_tokens: int = 0  # sampled
    row: dict[str, Any] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    results: list[list[str]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        return (self.task, self.decoding, self.prompt_index, self.seed, self.number)


class SampleFile:
    """Appends samples to a JSONL file; what it held before is in `done`."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """`facts`: what makes samples comparable, as JSON has it. Raises BadSamples if the file was made with
        others."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done: dict[tuple[str, str, int, int, int], Sample] = {}
        whole = 0
        if path.exists():
            found, samples, whole = _read(path)
            different = next((n for n in {**facts, **found} if found and found.get(n) != facts.get(n)), None)
            if different:
                was, now = (repr(side.get(different, "not set")) for side in (found, facts))
                raise BadSamples(
                    f"{path} is another evaluation's: its {different} was {was}, now it is {now}; "
                    "give another --out or remove the file"
                )
            self.done = {sample.key: sample for sample in samples}
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._file.truncate(whole)  # a line that a killed evaluation left half written
        if not whole:
            self._file.write(json.dumps({"evaluation": facts}) + "\n")

    def has(self, key: tuple[str, str, int, int, int]) -> bool:
        """Whether that sample is there and has a score."""
        return key in self.done and self.done[key].error is None

    def add(self, sample: Sample) -> None:
        self.done[sample.key] = sample
        self._file.write(json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        self._file.close()


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file. Raises BadSamples."""
    if not path.is_file():
        raise BadSamples(f"there is no samples file {path}; an evaluation writes one beside its .json")
    facts, samples, _ = _read(path)
    if not facts:
        raise BadSamples(f"{path} is no samples file; name the .jsonl that an evaluation has written")
    return list({sample.key: sample for sample in samples}.values())  # one drawn again replaces the first


def _read(path: Path) -> tuple[dict[str, Any], list[Sample], int]:
    """Facts, samples, and the bytes of whole lines."""
    facts: dict[str, Any] = {}
    samples, whole = [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            value = json.loads(line)
            if "evaluation" in value:
                facts = value["evaluation"]
            else:
                samples.append(Sample(**value))
        except (ValueError, TypeError) as error:
            raise BadSamples(f"{path}: not a samples file of this version ({error})") from error
        whole += len(line) + 1
    return facts, samples, whole


def summarise(samples: Iterable[Sample]) -> dict[str, Any]:
    """Success with its interval, pass@k, reward, components and stop reasons of one decoding's samples."""
    everything = _by_row(samples)
    scored = [sample for sample in everything if sample.error is None]
    success = mean_over_prompts([*_by_prompt(scored, _success).values()], proportion=True)
    return {
        "success": success.mean,
        "low": success.low,
        "high": success.high,
        "n": success.n,
        "samples": len(everything),
        "unscored": len(everything) - len(scored),
        "pass_at_k": {k: asdict(estimate) for k, estimate in _pass_at(scored).items()},
        "reward": asdict(_estimate(scored, _reward)),
        "components": {
            name: asdict(_estimate(scored, lambda sample, name=name: sample.components.get(name)))
            for name in _names(scored)
        },
        "seeds": {seed: mean for seed, mean in _by_seed(scored)},
        "errors": dict(Counter((s.error or "")[:_ERROR_CHARS] for s in everything if s.error).most_common(3)),
        "stop_reasons": {
            reason: {"count": count, "success": _share(scored, reason)}
            for reason, count in sorted(Counter(sample.stop_reason for sample in everything).items())
        },
        "tokens": _mean([float(sample.num_tokens) for sample in scored]),
    }


def difference(ours: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, Any]:
    """Ours minus theirs, prompt by prompt, for the prompts that both have. Raises BadSamples if none."""
    result: dict[str, Any] = {}
    ours, theirs = _by_row(ours), _by_row(theirs)
    for decoding in sorted({sample.decoding for sample in ours}):
        first, second = (
            [s for s in side if s.decoding == decoding and s.error is None] for side in (ours, theirs)
        )
        paired = {}
        for name, value in (("success", _success), ("reward", _reward)):
            left, right = _by_prompt(first, value), _by_prompt(second, value)
            common = [prompt for prompt in left if prompt in right]
            paired[name] = mean_over_prompts([left[prompt] - right[prompt] for prompt in common])
        if paired["success"].n:
            result[decoding] = {name: asdict(estimate) for name, estimate in paired.items()}
    if not result:
        raise BadSamples("the two evaluations have no prompt and decoding in common; evaluate the same task")
    return result


def _by_row(samples: Iterable[Sample]) -> list[Sample]:
    """The samples, `prompt` telling rows apart that have one prompt (and other files, tools or answers): they
    are as many prompts."""
    everything = list(samples)
    rows: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for prompt, task, index in sorted({(s.prompt, s.task, s.prompt_index) for s in everything}):
        rows[prompt].append((task, index))
    return [
        replace(s, prompt=f"{s.prompt} {rows[s.prompt].index((s.task, s.prompt_index))}") for s in everything
    ]


def _success(sample: Sample) -> float:
    return float(sample.success)


def _reward(sample: Sample) -> float | None:
    return sample.reward


def _by_prompt(samples: Iterable[Sample], value: Any) -> dict[str, float]:
    values = defaultdict(list)
    for sample in samples:
        if (number := value(sample)) is not None:
            values[sample.prompt].append(number)
    return {prompt: sum(numbers) / len(numbers) for prompt, numbers in values.items()}


def _estimate(samples: Sequence[Sample], value: Any) -> Estimate:
    return mean_over_prompts(list(_by_prompt(samples, value).values()))


def _pass_at(samples: Sequence[Sample]) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, … as far as every prompt has samples."""
    right = defaultdict(list)
    for sample in samples:
        right[sample.prompt].append(sample.success)
    least = min(map(len, right.values()), default=0)
    ks = [2**i for i in range(least.bit_length()) if 2**i <= least]
    return {
        k: mean_over_prompts([pass_at_k(len(m), sum(m), k) for m in right.values()], proportion=True)
        for k in ks
    }


def _names(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample.components))


def _by_seed(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    seeds = sorted({sample.seed for sample in samples})
    return [(seed, _mean([float(s.success) for s in samples if s.seed == seed])) for seed in seeds]


def _share(scored: Sequence[Sample], reason: str) -> float | None:
    """The success of those that ended so; None if none of them was scored."""
    ended = [float(sample.success) for sample in scored if sample.stop_reason == reason]
    return _mean(ended) if ended else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
