"""`search`: passages for a query, from a local BM25 index or from a retrieval server.

    search = bm25_tool("corpus.jsonl")                      # lines {"title": …, "text": …}
    search = retriever_tool("http://127.0.0.1:8000/retrieve")    # the API of Search-R1's servers

Invariant: an empty query is told to the model; a corpus or server that is not there is no fault of the model.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from toolcall.errors import ToolError, ToolUnavailable
from toolcall.registry import Tool, tool
from toolcall.tools.bm25_index import BadCorpus, Bm25Index, build_aside
from toolcall.tools.passages import NO_HIT, Passage, read_passage, show

MAX_TOP_K = 20
PASSAGE_CHARS = 1200
FIRST_CALL_S = 120.0  # opening an index, or waiting for the one who builds it


def bm25_tool(
    corpus: str | Path,
    *,
    name: str = "search",
    top_k: int = 3,
    index_dir: str | Path | None = None,
    passage_chars: int = PASSAGE_CHARS,
    folder: Path | None = None,
) -> Tool:
    """A search tool over a JSONL corpus. The index is built at the first call on a machine, and kept.

    folder: what a relative `corpus` or `index_dir` is relative to; the config's.
    """
    home = folder or Path()
    index = _Opened(home / corpus, home / index_dir if index_dir is not None else None)

    def search(query: str, top_k: int = top_k) -> str:
        _refuse_empty(query)
        try:
            passages = index.get().search(query, _bounded(top_k))
        except BadCorpus as error:
            raise ToolUnavailable(str(error)) from error
        return show(passages, passage_chars) or NO_HIT

    search.__doc__ = _describe(top_k)
    made = tool(name=name, timeout=FIRST_CALL_S, max_concurrency=8, idempotent=True)(search)
    return replace(made, prepare=index.prepare)


def retriever_tool(
    url: str,
    *,
    name: str = "search",
    top_k: int = 3,
    timeout: float = 10.0,
    headers: dict[str, str] | None = None,
    max_concurrency: int = 64,
    passage_chars: int = PASSAGE_CHARS,
) -> Tool:
    """A search tool that asks a server: `POST {"queries": [...], "topk": k, "return_scores": true}`."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"retriever_tool: url = {url!r} must begin with http:// or https://")
    server = _Retriever(url, headers or {}, timeout)

    async def search(query: str, top_k: int = top_k) -> str:
        _refuse_empty(query)
        return show(await server.search(query, _bounded(top_k)), passage_chars) or NO_HIT

    search.__doc__ = _describe(top_k)
    decorate = tool(name=name, timeout=timeout, max_concurrency=max_concurrency, idempotent=True, retries=2)
    return replace(decorate(search), prepare=server.prepare, probe=server.probe)


class _Opened:
    """An index that is opened at its first use, once for all threads."""

    def __init__(self, corpus: Path, index_dir: Path | None) -> None:
        self._corpus = corpus
        self._index_dir = index_dir
        self._lock = threading.Lock()
        self._index: Bm25Index | None = None

    async def prepare(self) -> str:
        """Build the index in a process of its own: bm25s is better not imported into the launcher's."""
        return await asyncio.to_thread(build_aside, self._corpus, self._index_dir)

    def get(self) -> Bm25Index:
        with self._lock:
            if self._index is None:
                self._index = Bm25Index.open(self._corpus, self._index_dir)
            return self._index


class _Retriever:
    """A client for each event loop, made when first used."""

    def __init__(self, url: str, headers: dict[str, str], timeout: float) -> None:
        self._url = url
        self._make = functools.partial(httpx.AsyncClient, headers=headers, timeout=timeout)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def probe(self) -> None:
        """Ask something; raises ToolUnavailable or TimeoutError if no answer can be read."""
        await self.search("test", 1)

    async def prepare(self) -> str:
        await self.probe()
        return f"{self._url} answers"

    async def search(self, query: str, top_k: int) -> list[Passage]:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = self._make(), loop
        body = {"queries": [query], "topk": top_k, "return_scores": True}
        try:
            response = await self._client.post(self._url, json=body)
            response.raise_for_status()
            return [_read_hit(hit) for hit in response.json()["result"][0]]
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self._url} gave no answer in time") from error
        except httpx.HTTPError as error:
            raise ToolUnavailable(f"{self._url}: {error or type(error).__name__}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ToolUnavailable(
                f'{self._url} answered something else than {{"result": [[{{"document": …}}, …]]}}: {error!r}'
            ) from error


def _read_hit(hit: dict[str, Any]) -> Passage:
    """`{"document": {…}, "score": …}`, or the document alone, as servers answer without scores."""
    return read_passage(hit.get("document", hit), float(hit.get("score", 0.0)))


def _describe(top_k: int) -> str:
    return f"""Search a collection of texts. The best passages come first.

    Args:
        query: Words to look for.
        top_k: How many passages, at most {MAX_TOP_K}; usually {top_k} are enough.
    """


def _refuse_empty(query: str) -> None:
    if not query.strip():
        raise ToolError("the query is empty; write the words to look for")


def _bounded(top_k: int) -> int:
    if not 1 <= top_k <= MAX_TOP_K:
        raise ToolError(f"top_k = {top_k} must be between 1 and {MAX_TOP_K}")
    return top_k
