"""Credentials of a run: one seed file per role and the broker's list of public keys, mode 0600, in one folder.

Beside them lies the key that weights are signed with, which is no user of the broker: ``weight_publisher.nk`` belongs
on the sender's node alone, ``weight_publisher.pub`` on every node that receives.

``python -m headrace.bus.credentials FOLDER`` makes them for a broker that an operator starts by hand.
"""

import os
import sys
from pathlib import Path

from headrace.bus.keys import Key
from headrace.bus.permissions import ROLES, users_conf

PUBLISHER = "weight_publisher"
"""Name of the key that signs weights."""


def write(folder: Path) -> Path:
    """Make or complete a folder: existing seeds stay valid, ``users.conf`` is written anew. Returns the folder.

    Existing seeds stay, so that a broker that is started again on the same run knows the actors that still live.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    public = {role: _key(folder / f"{role}.nk").public for role in ROLES}
    private(folder / "users.conf", users_conf(public))
    known = folder / f"{PUBLISHER}.pub"
    if (folder / f"{PUBLISHER}.nk").exists() or not known.exists():
        private(known, _key(folder / f"{PUBLISHER}.nk").public + "\n")
    return folder


def adopt_publisher(folder: Path, source: Path) -> None:
    """Receive what another folder's publisher signs: a region's folder takes its hub's. Nothing when there is none."""
    found = source / f"{PUBLISHER}.pub"
    if found.exists():
        (folder / f"{PUBLISHER}.nk").unlink(missing_ok=True)
        private(folder / f"{PUBLISHER}.pub", found.read_text(encoding="ascii"))


def _key(path: Path) -> Key:
    """The key of a seed file, which is made anew where there is none that can be read."""
    try:
        return Key.parse(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        key = Key.make()
        private(path, key.seed + "\n")
        return key


def private(path: Path, text: str) -> None:
    """Write a file that is never readable by others, not even for a moment, and never half written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
    scratch.replace(path)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "credentials"))
