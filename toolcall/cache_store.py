"""Kept results of tools on disk, shared by the actors of a run and by later runs that resume it.

Invariant: a result that is served was stored whole under the same key, and is younger than its tool's
`cache_ttl`. SQLite in WAL mode: any number of processes of one host may read and write, and a killed one
leaves nothing half-written. A store that cannot be used costs a run of the tool, never the call. Called by
the executor in a thread.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 2.0


class CacheStore:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # one connection, calls from several threads
        self._database = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")  # a lost result is computed again
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS results "
            "(key TEXT PRIMARY KEY, text TEXT NOT NULL, stored REAL NOT NULL)"
        )

    def get(self, key: str) -> tuple[str, float] | None:
        """The text and the unix time at which it was stored."""
        try:
            with self._lock:
                return self._database.execute(
                    "SELECT text, stored FROM results WHERE key = ?", (key,)
                ).fetchone()
        except sqlite3.Error as error:
            logger.warning("the tool cache cannot be read: %s", error)
            return None

    def put(self, key: str, text: str, stored: float) -> None:
        try:
            with self._lock:
                self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (key, text, stored))
        except sqlite3.Error as error:
            logger.warning("the tool cache cannot be written: %s", error)

    def close(self) -> None:
        with self._lock:
            self._database.close()
