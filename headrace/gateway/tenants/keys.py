"""API keys of the gateway: each belongs to a tenant, and only its hash is stored.

A fast hash is enough: a key is 32 random bytes, so nobody can find it from its SHA-256 by trying. The file has mode
0600; it is written under another name and renamed, so that a reader never sees a part of it. A running gateway reads a
changed file at its next request.
"""

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import msgspec

from headrace.config import Config
from headrace.errors import WRONG_INPUT, HeadraceError

PREFIX = "hr-"
Scope = Literal["turns", "agents", "feedback", "purge"]
"""The routes that a key opens: turns of the tenant's own agents; headrace's agent; ratings; the purge of a user."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
USUAL: tuple[Scope, ...] = ("turns", "agents", "feedback")
"""The scopes of a key for which none are named: a purge cannot be undone, so it is never among them."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a key. The key itself is shown once, when it is made."""

    id: str
    """The first eight digits of its hash: enough to name it in a list."""
    tenant: str
    training: bool = False
    """The tenant opted in: sessions of this key may be trained on once they are rated."""
    requests_per_minute: int = 600
    scopes: tuple[Scope, ...] = USUAL
    created: float
    """Seconds since the epoch."""


def key_file(config: Config) -> Path:
    """The path of a configuration's key file."""
    return Path(config.production.keys or Path(config.run.dir) / "keys.json")


class KeyFileError(HeadraceError, exit_status=WRONG_INPUT):
    """The key file cannot be used; the text says why."""


class ApiKeys:
    """The keys in one file. A missing file holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: dict[str, ApiKey] = {}

    def add(
        self,
        tenant: str,
        *,
        training: bool = False,
        requests_per_minute: int = 600,
        scopes: Sequence[Scope] = USUAL,
    ) -> str:
        """Create a key for a tenant and return it. Only its hash is stored, so it cannot be shown again."""
        key = PREFIX + secrets.token_urlsafe(32)
        digest = _digest(key)
        entry = ApiKey(
            id=digest[:8],
            tenant=tenant,
            training=training,
            requests_per_minute=requests_per_minute,
            scopes=tuple(scopes),
            created=time.time(),
        )
        with self._alone():
            self._write(self._read() | {digest: entry})
        return key

    def revoke(self, id: str) -> ApiKey:
        """Remove the key with this id. KeyFileError when there is none."""
        with self._alone():
            keys = self._read()
            digest = next((digest for digest, entry in keys.items() if entry.id == id), None)
            if digest is None:
                raise KeyFileError(f"{self._path} has no key {id!r}; `headrace keys` shows those that exist")
            removed = keys.pop(digest)
            self._write(keys)
        return removed

    def entries(self) -> list[ApiKey]:
        """All keys, oldest first."""
        return sorted(self._read().values(), key=lambda entry: entry.created)

    def find(self, key: str) -> ApiKey | None:
        """The record of a key; None for a key that was never made or is revoked.

        The lookup is by hash, so its duration reveals nothing about existing keys.
        """
        entries = self._read()
        return entries.get(_digest(key))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the file's writers: `headrace up` writes it too."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, ApiKey]:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._keys = None, {}
            return {}
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            try:
                self._keys = msgspec.json.decode(self._path.read_bytes(), type=dict[str, ApiKey])
            except (OSError, msgspec.DecodeError) as error:
                raise KeyFileError(f"{self._path} is not a file of API keys: {error}") from None
            self._stamp = stamp
        return dict(self._keys)

    def _write(self, keys: dict[str, ApiKey]) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.part")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)))
        partial.rename(self._path)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
