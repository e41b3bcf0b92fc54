"""What does a BM25 query cost? 50,000 passages, through the executor as a model's call, and bare.

    python benchmarks/toolcall_search.py [--passages 50000] [--queries 500]

Passages are drawn from a vocabulary of 50,000 words by Zipf's law, 60 words each; queries are three words of
a passage. Shown: building the index, opening it, a query in the index, the same as a tool call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from toolcall import Executor, ToolCall, ToolContext
from toolcall.tools.bm25_index import Bm25Index
from toolcall.tools.search import bm25_tool
from toolcall.types import ParsedTurn

WORDS, WORDS_EACH = 50_000, 60


def write_corpus(path: Path, passages: int, queries: int) -> list[str]:
    """Write the corpus; returns queries that its passages can answer."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(10, WORDS + 10)
    drawn = rng.choice(WORDS, size=(passages, WORDS_EACH), p=chances / chances.sum())
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(drawn):
            text = " ".join(f"word{word}" for word in row)
            file.write(json.dumps({"title": f"passage {number}", "text": text}) + "\n")
    return [" ".join(f"word{word}" for word in rng.choice(row, 3)) for row in drawn[:queries]]


async def call_tool(corpus: Path, queries: list[str]) -> list[float]:
    """Seconds of each query as a tool call: validated, run in a thread, shown as text."""
    executor = Executor([bm25_tool(corpus)])
    seconds = []
    for query in ("first", *queries):
        started = time.perf_counter()
        turn = ParsedTurn((ToolCall("0", "search", {"query": query, "top_k": 3}),))
        await executor.run(turn, ToolContext())
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def call_index(index: Bm25Index, queries: list[str]) -> list[float]:
    seconds = []
    for query in queries:
        started = time.perf_counter()
        assert index.search(query, 3)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        queries = write_corpus(corpus, options.passages, options.queries)
        import bm25s  # noqa: F401 - its import, seconds, is not the index's

        marks = [time.perf_counter()]
        Bm25Index.open(corpus)
        marks.append(time.perf_counter())
        index = Bm25Index.open(corpus)
        marks.append(time.perf_counter())
        bare, through = call_index(index, queries), asyncio.run(call_tool(corpus, queries))
    table = Table(f"{options.passages:,} passages", "p50 ms", "p99 ms")
    for name, seconds in (("query in the index", bare), ("query as a tool call", through)):
        table.add_row(name, *(f"{1000 * np.percentile(seconds, q):.2f}" for q in (50, 99)))
    console = Console()
    console.print(table)
    console.print(
        f"index built in {marks[1] - marks[0]:.1f} s, opened again in {1000 * (marks[2] - marks[1]):.0f} ms"
    )


if __name__ == "__main__":
    main()
