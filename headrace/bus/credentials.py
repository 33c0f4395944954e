"""Credentials of a run: one seed file per role and the broker's list of public keys, mode 0600, in one folder.

``python -m headrace.bus.credentials FOLDER`` makes them for a broker that an operator starts by hand.
"""

import os
import sys
from pathlib import Path

from headrace.bus.keys import Key
from headrace.bus.permissions import ROLES, users_conf


def write(folder: Path) -> Path:
    """Make or complete a folder: existing seeds stay valid, ``users.conf`` is written anew. Returns the folder.

    Existing seeds stay, so that a broker that is started again on the same run knows the actors that still live.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    public: dict[str, str] = {}
    for role in ROLES:
        path = folder / f"{role}.nk"
        try:
            key = Key.parse(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            key = Key.make()
            _private(path, key.seed + "\n")
        public[role] = key.public
    _private(folder / "users.conf", users_conf(public))
    return folder


def _private(path: Path, text: str) -> None:
    """Write a file that is never readable by others, not even for a moment, and never half written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
    scratch.replace(path)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "credentials"))
