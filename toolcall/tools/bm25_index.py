"""A BM25 index over a JSONL corpus: built once on a machine, memory-mapped by everyone who searches.

Invariant: an index folder that exists is whole (it is built aside, under a lock, and renamed), and belongs to
the corpus as it is (its name has the file's size and time). Passages stay in the corpus; the index has their
places. Scores are bm25s's. Used by `toolcall.tools.search`.

bm25s brings numba, whose import takes seconds and disturbs vLLM's start in the same process, so it is
imported where an index is opened and not above.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout

from toolcall.tools.passages import Passage, read_passage

LOCK_S = 3600.0  # for another process to build the index
_FORMAT = "1"  # of the folder; a change makes all indexes anew


class BadCorpus(ValueError):
    """A corpus that cannot be searched; the message names the file, the line and the mend."""


class Bm25Index:
    """Use `open`. Safe to search from several threads."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        import bm25s

        self._bm25s = bm25s
        self._retriever = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")
        with corpus.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def open(cls, corpus: Path, index_dir: Path | None = None) -> Self:
        """The index of `corpus`, built if there is none. `index_dir`: where indexes go; None: beside it.

        Raises BadCorpus.
        """
        if not corpus.is_file():
            raise BadCorpus(
                f"search: there is no corpus {corpus}; give a JSONL file, one passage on each line"
            )
        folder = _folder(corpus, index_dir or corpus.parent)
        if not folder.exists():
            _build_once(corpus, folder)
        return cls(corpus, folder)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def search(self, query: str, top_k: int) -> list[Passage]:
        """At most `top_k` passages that share a word with the query, best first."""
        tokens = self._bm25s.tokenize([query], show_progress=False, return_ids=False)
        if not tokens[0]:
            return []
        found, scores = self._retriever.retrieve(tokens, k=min(top_k, len(self)), show_progress=False)
        hits = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [self._passage(place, score) for place, score in hits if score > 0]

    def _passage(self, place: int, score: float) -> Passage:
        line = self._lines[int(self._starts[place]) : int(self._starts[place + 1])]
        return read_passage(json.loads(line), score)


def build_aside(corpus: Path, index_dir: Path | None) -> str:
    """Build the index, if there is none, in a process of its own. Says what there is; raises BadCorpus."""
    command = [sys.executable, "-m", __name__, str(corpus), *([str(index_dir)] if index_dir else [])]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LOCK_S, check=False
    )
    if done.returncode:
        raise BadCorpus((done.stderr.strip().splitlines() or [f"search: indexing {corpus} failed"])[-1])
    return done.stdout.strip()


def _folder(corpus: Path, parent: Path) -> Path:
    facts = corpus.stat()
    key = f"{_FORMAT} {corpus.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return parent / f"{corpus.name}.bm25-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _build_once(corpus: Path, folder: Path) -> None:
    """Build aside and rename, unless someone else has done it while we waited for the lock."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=LOCK_S):
            if folder.exists():
                return
            aside = folder.with_name(folder.name + ".new")
            shutil.rmtree(aside, ignore_errors=True)  # of a builder that was killed
            _build(corpus, aside)
            aside.rename(folder)
    except Timeout:
        raise BadCorpus(f"search: {folder}.lock is held for {LOCK_S:g} s; is its builder stuck?") from None
    except PermissionError as error:
        raise BadCorpus(
            f"search: {error.filename} cannot be written; set index_dir to a folder that can"
        ) from None


def _build(corpus: Path, folder: Path) -> None:
    import bm25s

    texts, starts = _read(corpus)
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    retriever.save(str(folder), show_progress=False)
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))


def _read(corpus: Path) -> tuple[list[str], list[int]]:
    """Every passage's words, and where each line begins; the last is the file's end."""
    texts, starts, place = [], [], 0
    with corpus.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                passage = _parse(line, f"{corpus}:{number}")
                texts.append(f"{passage.title} {passage.text}")
                starts.append(place)
            place += len(line)
    if not texts:
        raise BadCorpus(f"search: the corpus {corpus} is empty")
    return texts, [*starts, place]


def _parse(line: bytes, where: str) -> Passage:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise BadCorpus(f"search: {where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadCorpus(f"search: {where} is a {type(row).__name__}, not an object")
    try:
        return read_passage(row)
    except ValueError as error:
        raise BadCorpus(f"search: {where} {error}") from None


if __name__ == "__main__":
    try:
        index = Bm25Index.open(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    except BadCorpus as error:
        sys.exit(str(error))
    print(f"{len(index):,} passages of {sys.argv[1]}")
