"""The gateway's key of a run: for the simulated users, and for the operator of the machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.bus.broker.credentials import private
from headrace.config import Config
from headrace.gateway.tenants.keys import ApiKeys, KeyFileError, key_file
from headrace.launch.runs import RunError

PER_MINUTE = 6000
"""Requests a minute of the key."""


def place(folder: Path) -> Path:
    """<run dir>/<id>/gateway.key, mode 0600: the key and nothing else."""
    return folder / "gateway.key"


@contextmanager
def key_of_run(config: Config, folder: Path) -> Iterator[Path]:
    """The file of a key that the run's gateways accept while the block runs, of the tenant of headrace's own agent.

    A key that an interrupted `headrace up` of the same run left is revoked. RunError.
    """
    keys, path = ApiKeys(key_file(config)), place(folder)
    production = config.production
    try:
        if path.is_file():
            _revoke(keys, path)
        key = keys.add(production.tenant, training=production.training_allowed, requests_per_minute=PER_MINUTE)
    except KeyFileError as error:
        raise RunError(f"{error}; move it away, or name another [production] keys", 3) from None
    private(path, key)
    try:
        yield path
    finally:
        _revoke(keys, path)


def _revoke(keys: ApiKeys, path: Path) -> None:
    """Remove the file, and its key from the gateway's."""
    entry = keys.find(path.read_text(encoding="ascii").strip())
    path.unlink()
    if entry is not None:
        keys.revoke(entry.id)
