"""A cache of judge models' answers by question, so that no question is asked and paid for twice.

One SQLite file; several processes of a machine may share it.
"""

import sqlite3
from pathlib import Path

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one question."""

    met: bool
    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Cache:
    """The cache file. Every write is one transaction."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create it where it is missing. OSError, sqlite3.Error."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A judge opens it in the thread that hashes its model, and then uses it in the event loop alone.
        self._store = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        self._store.execute("PRAGMA journal_mode = WAL")
        self._store.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB NOT NULL)")

    def get(self, key: str) -> Answer | None:
        """The answer to a question; None if it was never asked."""
        row = self._store.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return msgspec.json.decode(row[0], type=Answer) if row is not None else None

    def put(self, key: str, answer: Answer) -> None:
        """Store an answer; the first answer to a question stays."""
        self._store.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, msgspec.json.encode(answer)))

    def close(self) -> None:
        """Close the file."""
        self._store.close()
