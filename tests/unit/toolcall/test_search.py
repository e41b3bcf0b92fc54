"""The search tools: BM25 over a corpus file, and the client of a retrieval server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolcall.support import run_one
from toolcall import Executor, Outcome, Tool, ToolResult, ToolUnavailable
from toolcall.tools import bm25_index
from toolcall.tools.bm25_index import BadCorpus, Bm25Index
from toolcall.tools.search import bm25_tool, retriever_tool

ROWS = [
    {"title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "7", "contents": '"Seine"\nThe Seine is a river that flows through Paris to the sea.'},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8"
    )
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write(tmp_path / "corpus.jsonl", ROWS)


def call(tool: Tool, **arguments: Any) -> ToolResult:
    return asyncio.run(run_one(Executor([tool]), tool, **arguments))


def test_the_best_passage_comes_first_with_its_title(corpus):
    result = call(bm25_tool(corpus), query="capital of Germany", top_k=1)
    assert (result.outcome, result.text) == (Outcome.OK, "[1] Berlin\nBerlin is the capital of Germany.")


def test_a_title_in_quotes_before_the_contents_is_a_title(corpus):
    (passage,) = Bm25Index.open(corpus).search("sea", 3)
    assert (passage.title, passage.text) == (
        "Seine",
        "The Seine is a river that flows through Paris to the sea.",
    )


@pytest.mark.parametrize("query", ["xylophone", "?!", "the"])
def test_no_hit_is_said(corpus, query):
    assert call(bm25_tool(corpus), query=query).text == "no passage matches; try other words"


def test_an_empty_query_and_a_wild_top_k_are_the_model_s_errors(corpus):
    tool = bm25_tool(corpus)
    assert call(tool, query="  ").text == "the query is empty; write the words to look for"
    assert call(tool, query="Paris", top_k=0).outcome is Outcome.TOOL_ERROR
    assert len(call(tool, query="Paris capital river", top_k=20).text.split("\n\n")) == 3


def test_long_passages_are_cut_at_a_word(tmp_path):
    corpus = write(tmp_path / "c.jsonl", [{"text": "cats " + "and dogs " * 99}])
    assert call(bm25_tool(corpus, passage_chars=20), query="cats").text == "[1]\ncats and dogs and …"


def test_the_index_is_built_once_by_many_openers(corpus, monkeypatch):
    builds = []
    build = bm25_index._build
    monkeypatch.setattr(bm25_index, "_build", lambda *args: (builds.append(1), build(*args)))
    threads = [threading.Thread(target=Bm25Index.open, args=(corpus,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    Bm25Index.open(corpus)
    assert len(builds) == 1


def test_a_changed_corpus_gets_a_new_index(corpus):
    assert Bm25Index.open(corpus).search("Rome", 1) == []
    write(corpus, [*ROWS, {"title": "Rome", "text": "Rome is in Italy."}])
    assert Bm25Index.open(corpus).search("Rome", 1)[0].title == "Rome"


def test_a_builder_that_died_leaves_nothing_that_counts(corpus, monkeypatch):
    def dies(_, folder):
        folder.mkdir()
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bm25_index, "_build", dies)
        with pytest.raises(KeyboardInterrupt):
            Bm25Index.open(corpus)
    assert Bm25Index.open(corpus).search("Berlin", 1)[0].title == "Berlin"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["{'a': 1}"], ":1 is not JSON"),
        ([ROWS[0], "[1]"], ":3 is a list, not an object"),
        (
            [ROWS[0], {"body": "x"}],
            ":3 has no text under any of text, contents, content, passage; it has body",
        ),
        ([], "is empty"),
    ],
)
def test_a_bad_corpus_is_refused_with_its_line(tmp_path, rows, says):
    with pytest.raises(BadCorpus, match=says):
        Bm25Index.open(write(tmp_path / "bad.jsonl", rows))


def test_a_corpus_that_is_not_there_is_no_fault_of_the_model(tmp_path):
    result = call(bm25_tool("none.jsonl", folder=tmp_path), query="x")
    assert result.outcome is Outcome.INFRASTRUCTURE
    assert f"there is no corpus {tmp_path / 'none.jsonl'}" in result.text


@contextmanager
def server(answer: Any, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A retrieval server with one answer, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/retrieve", asked
        httpd.shutdown()
        thread.join()


DOCUMENT = {"id": "7", "contents": '"Seine"\nA river.'}


@pytest.mark.parametrize("hit", [{"document": DOCUMENT, "score": 1.5}, DOCUMENT])
def test_a_search_r1_server_is_asked_and_read(hit):
    with server({"result": [[hit]]}) as (url, asked):
        result = call(retriever_tool(url), query="river", top_k=2)
    assert (result.outcome, result.text) == (Outcome.OK, "[1] Seine\nA river.")
    assert asked == [{"queries": ["river"], "topk": 2, "return_scores": True}]


def test_a_server_s_empty_answer_is_no_hit():
    with server({"result": [[]]}) as (url, _):
        assert call(retriever_tool(url), query="x").text == "no passage matches; try other words"


@pytest.mark.parametrize(("answer", "status"), [({"detail": "x"}, 200), ([1], 200), ({}, 500), ({}, 404)])
def test_a_server_s_failure_is_no_fault_of_the_model(answer, status):
    with server(answer, status) as (url, asked):
        tool = retriever_tool(url)
        with pytest.raises(ToolUnavailable, match=url):
            asyncio.run(tool.fn("x"))
    assert len(asked) == 1


def test_importing_the_tools_imports_no_bm25s():
    """It brings numba, which breaks the start of vLLM's CPU worker in a process whose main imports it."""
    code = "import sys, toolcall.tools.search; print({'bm25s', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "set()", done.stderr


def test_preparing_builds_the_index_in_another_process(corpus):
    tool = bm25_tool(corpus)
    assert asyncio.run(tool.prepare()) == f"3 passages of {corpus}"
    assert [path.name for path in corpus.parent.iterdir() if path.is_dir()] != []


def test_preparing_a_bad_corpus_says_why(tmp_path):
    with pytest.raises(BadCorpus, match=r":1 is not JSON"):
        asyncio.run(bm25_tool(write(tmp_path / "bad.jsonl", ["{"])).prepare())


def test_preparing_a_retrieval_server_asks_it():
    with server({"result": [[DOCUMENT]]}) as (url, asked):
        assert asyncio.run(retriever_tool(url).prepare()) == f"{url} answers"
    assert len(asked) == 1
    with pytest.raises(ToolUnavailable, match=url):
        asyncio.run(retriever_tool(url).prepare())
