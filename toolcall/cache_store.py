"""Kept results of tools on disk, shared by the actors of a run and by later runs that resume it.

Invariant: a result that is served was stored whole under the same key, and is younger than its tool's
`cache_ttl`. SQLite in WAL mode: any number of processes of one host may read and write, and a killed one
leaves nothing half-written. A store that cannot be used costs a run of the tool, never the call.

Called by the executor: `get` in its event loop, since a read never waits for a writer and takes less than
a thread would; `put` in a thread, since writers wait for each other.
"""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0  # of one writer for the others


class CacheStore:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # of the writer, which several threads use
        self._writer = _connect(path, WRITE_TIMEOUT_S)
        with path.with_suffix(".lock").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)  # turning WAL on fails at once if another process is at it
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute("PRAGMA synchronous = OFF")  # a lost result is computed again
            self._writer.execute(
                "CREATE TABLE IF NOT EXISTS results "
                "(key TEXT PRIMARY KEY, text TEXT NOT NULL, stored REAL NOT NULL)"
            )
        self._reader = _connect(path, timeout=0.0)

    def get(self, key: str) -> tuple[str, float] | None:
        """The text and the unix time at which it was stored."""
        try:
            return self._reader.execute("SELECT text, stored FROM results WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            logger.warning("the tool cache cannot be read: %s", error)
            return None

    def put(self, key: str, text: str, stored: float) -> None:
        try:
            with self._lock:
                self._writer.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (key, text, stored))
        except sqlite3.Error as error:
            logger.warning("the tool cache cannot be written: %s", error)

    def close(self) -> None:
        self._reader.close()
        with self._lock:
            self._writer.close()


def _connect(path: Path, timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=timeout, check_same_thread=False, isolation_level=None)
