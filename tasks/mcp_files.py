"""The shipped task `mcp_files`: put a small file system in order by the tools of an MCP server of its own.

Each trajectory has its own server on its own folder, filled from the row (`[task.mcp.files]` of the recipe,
the server is `tasks/servers/files.py`), and is scored by what the folder holds at the end.

Invariant: what the model says counts for nothing; and no held-out question is trained on. Called by
`tasks.loading`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from tasks.conduct import well_formed_calls
from tasks.reward import reward
from tasks.shipped import check_range, drawn_rows, one_call, prompt_maker
from tasks.types import Reward, Row, Task
from toolcall import ToolContext

SYSTEM = "Do what is asked with the tools. Then answer: Done."
HELD_OUT_SEED = -1
GRADES = 3
_NAMES = ("notes", "plan", "list", "report", "ideas", "budget", "letter", "log", "recipe", "draft")
_WORDS = ("blue", "seven", "river", "lemon", "north", "paper", "tiger", "cloud", "silver", "maple")
_SHOTS = (
    ("Delete old.txt.", "delete_file", {"path": "old.txt"}, "deleted old.txt"),
    (
        "Make the file hello.txt with the text: good morning",
        "write_file",
        {"path": "hello.txt", "text": "good morning"},
        "wrote hello.txt",
    ),
)


def final_files(context: ToolContext, files: Mapping[str, str]) -> dict[str, str]:
    """What the trajectory's folder holds: path → text. Without a call it was never made, so `files` stand."""
    folder: Path | None = context.state.get("folder")
    if folder is None:
        return dict(files)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8", "replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@reward
def files_match(context: ToolContext, files: dict[str, str], wanted: dict[str, str]) -> float:
    """1 if the folder holds exactly the `wanted` files at the end, else 0. White space around texts aside."""
    return float(_stripped(final_files(context, files)) == _stripped(wanted))


@reward(weight=0.2)
def files_changed(context: ToolContext, files: dict[str, str], wanted: dict[str, str]) -> float:
    """Share of the files to change that are as wanted; 0 if any other file was touched."""
    before, after, right = map(_stripped, (files, final_files(context, files), wanted))
    to_change = {path for path in before | right if before.get(path) != right.get(path)}
    if any(before.get(path) != after.get(path) for path in (before | after).keys() - to_change):
        return 0.0
    return sum(after.get(path) == right.get(path) for path in to_change) / max(1, len(to_change))


def _stripped(files: Mapping[str, str]) -> dict[str, str]:
    return {path: text.strip() for path, text in files.items()}


def mcp_files_task(
    seed: int,
    grade: int = GRADES,
    shots: int = len(_SHOTS),
    train_size: int = 2000,
    held_out_size: int = 200,
) -> Task:
    """Jobs of difficulty 1 (one call is enough) to `grade` (files must be read first).

    Success: `files_match`. Rewards: `files_match` 1, `files_changed` 0.2, `well_formed_calls` 0.1.
    """
    check_range("grade", grade, 1, GRADES)
    check_range("shots", shots, 0, len(_SHOTS))
    check_range("train_size", train_size, 1)
    check_range("held_out_size", held_out_size, 1)

    def make(rng: random.Random, number: int) -> Row:
        return job(rng, 1 + number % grade)

    return Task(
        name="mcp_files",
        train=drawn_rows(train_size, seed, make, held_out=False),
        held_out=drawn_rows(held_out_size, HELD_OUT_SEED, make, held_out=True),
        make_messages=prompt_maker(SYSTEM, [one_call(*shot, reply="Done.") for shot in _SHOTS[:shots]]),
        tools=(),
        parser=None,
        rewards=(
            Reward("files_match", files_match.fn, 1.0),
            Reward("files_changed", files_changed.fn, 0.2),
            Reward("well_formed_calls", well_formed_calls.fn, 0.1),
        ),
        success=lambda episode: episode.scores.get("files_match", 0.0) == 1.0,
    )


def job(rng: random.Random, grade: int) -> Row:
    """A question, the `files` there are and the `wanted` ones."""
    names = [f"{name}.txt" for name in rng.sample(_NAMES, rng.randint(3, 5))]
    files = {name: " ".join(rng.sample(_WORDS, 3)) for name in names}
    wanted = dict(files)
    question = rng.choice(_KINDS[grade - 1])(rng, files, wanted)
    return {"question": question, "files": files, "wanted": wanted, "grade": grade}


def _delete(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    name = rng.choice(list(files))
    del wanted[name]
    return f"Delete {name}."


def _make(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    name, text = f"new_{rng.randint(1, 99)}.txt", " ".join(rng.sample(_WORDS, 2))
    wanted[name] = text
    return f"Make the file {name} with the text: {text}"


def _rename(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    name, new = rng.choice(list(files)), f"old_{rng.randint(1, 99)}.txt"
    wanted[new] = wanted.pop(name)
    return f"Move {name} to {new}."


def _sort_away(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    first, second = rng.sample(list(files), 2)
    for name in (first, second):
        wanted[f"archive/{name}"] = wanted.pop(name)
    return f"Move {first} and {second} into the folder archive."


def _replace_all(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    first, second = rng.sample(list(files), 2)
    text = " ".join(rng.sample(_WORDS, 2))
    wanted[first] = text
    del wanted[second]
    return f"Replace the text of {first} by: {text}. Then delete {second}."


def _copy(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    name, copy = rng.choice(list(files)), f"copy_{rng.randint(1, 99)}.txt"
    wanted[copy] = files[name]
    return f"Make {copy} with the same text as {name}."


def _delete_by_word(rng: random.Random, files: Mapping[str, str], wanted: dict[str, str]) -> str:
    word = rng.choice(files[rng.choice(list(files))].split())
    for name, text in files.items():
        if word in text.split():
            del wanted[name]
    return f"Delete every file whose text has the word {word}."


_KINDS = ((_delete, _make, _rename), (_sort_away, _replace_all), (_copy, _delete_by_word))
