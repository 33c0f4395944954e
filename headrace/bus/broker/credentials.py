"""Credentials of a run: one seed file per role and the broker's list of public keys, mode 0600, in one folder.

The folder also holds the key that signs weights, which is not a user of the broker: ``weight_publisher.nk`` belongs on
the sender's node alone, ``weight_publisher.pub`` on every node that receives. ``writers.pub`` names the public keys
with which the roles sign their records; it belongs on every node. To change a role's seed, remove the seed and run this
again: the old public key stays, so that old records hold. Remove its line when they are gone. ``--trust`` adds the keys
of a region's roles.

``python -m headrace.bus.broker.credentials FOLDER`` makes them for a broker that an operator starts by hand. With
``--run`` (once per run) runs that share a broker get an account each, with seeds in ``FOLDER/<run>``. Every command
that is given FOLDER then takes the seeds of its own run (`of_run`). With certificates in it the broker requires TLS
(broker/tls.py).
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.bus.broker import accounts as broker_accounts
from headrace.bus.broker import tls
from headrace.bus.broker.keys import Key
from headrace.bus.broker.permissions import REGIONAL, ROLES
from headrace.bus.errors import BusError
from headrace.bus.signatures import FILE, parse
from headrace.messages.subjects import token

PUBLISHER = "weight_publisher"
"""Name of the key that signs weights."""
WRITERS = FILE
"""File with the public keys with which roles sign their records."""


def write_accounts(folder: Path, runs: Sequence[str]) -> Path:
    """Make or complete a folder with an account per run: seeds in ``<folder>/<run>``, all users in ``users.conf``.

    Runs that the folder already has are kept, so a run is added to a broker by calling this again and reloading the
    broker (``nats-server --signal reload``). Returns the folder. ValueError for a run that is no legal subject token.
    """
    for run in runs:
        if not run or token(run) != run:
            raise ValueError(f"expected a run id of lower-case letters, digits, '-' and '_', got {run!r}")
    _private_folder(folder)
    roles: dict[str, dict[str, str]] = {}
    for run in sorted({*accounts(folder), *runs}):
        run_folder = folder / run
        roles[run] = _actors(run_folder)
        _publisher(run_folder)
    private(folder / "users.conf", broker_accounts.conf(roles) + tls.server_conf(folder))
    return folder


def accounts(folder: Path) -> list[str]:
    """The runs that have an account of their own in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.nk")))


def of_run(credentials: str, run: str) -> str:
    """The credentials of a run: the seeds of its own account where the folder holds an account per run, else
    `credentials` itself. BusError when there are accounts and none is this run's."""
    folder = Path(credentials)
    if not credentials or not folder.is_dir() or not (runs := accounts(folder)):
        return credentials
    if run not in runs:
        raise BusError(
            f"{folder} has accounts of {', '.join(runs)} and none of the run {run!r}: name one of them as [run] id, or "
            f"add the account with `python -m headrace.bus.broker.credentials {folder} --run ID` and reload the broker"
        )
    return str(folder / run)


def unused(credentials: str) -> str:
    """The error for `[bus] credentials` without `[bus] url`."""
    return (
        "bus.credentials is set and bus.url names no broker (`headrace up` makes keys for the broker that it starts): "
        f"set bus.url to the broker of {credentials}, or remove bus.credentials"
    )


def write(folder: Path, *, writers: Sequence[str] = ROLES) -> Path:
    """Make or complete a folder: existing seeds stay valid, ``users.conf`` is written anew. Returns the folder.

    Existing seeds stay valid, so that a broker that is restarted on the same run accepts the actors that are still
    alive. writers: the roles whose records the folder's actors accept under these seeds; in a region not the hub's.
    """
    public = _actors(folder, writers)
    private(folder / "users.conf", broker_accounts.conf({"": public}) + tls.server_conf(folder))
    _publisher(folder)
    return folder


def _private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def seeds(folder: Path, names: Sequence[str] = ROLES) -> dict[str, str]:
    """Make the missing seeds of a folder; role to public key."""
    _private_folder(folder)
    return {name: _key(folder / f"{name}.nk").public for name in names}


def _actors(folder: Path, writers: Sequence[str] = ROLES) -> dict[str, str]:
    """The roles' seeds. writers: of these the folder's actors accept records."""
    public = seeds(folder)
    _add_writers(folder, [f"{role} {key}" for role, key in public.items() if role in writers])
    return public


def _add_writers(folder: Path, lines: Sequence[str]) -> None:
    """Add lines to the public keys of the roles; those that are there stay."""
    file = folder / WRITERS
    known = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    if new := [line for line in lines if line not in known]:
        private(file, "\n".join([*known, *new, ""]))


def trust(folder: Path, writers: Path, roles: Sequence[str] = ROLES) -> None:
    """Accept the records that the roles of another folder sign, for example a region's. roles: of its lines, only
    these are taken. BusError when the file cannot be read."""
    try:
        lines = [f"{role} {key}" for key, (_, named) in parse(writers.read_text(encoding="ascii")).items()
                 for role in sorted(named) if role in roles]  # fmt: skip
    except (OSError, ValueError) as error:
        raise BusError(f"{writers} holds no public keys of roles: {error}") from None
    _add_writers(folder, lines)


def _publisher(folder: Path) -> None:
    """Make the key that weights are signed with, unless the folder holds only another publisher's public key."""
    public = folder / f"{PUBLISHER}.pub"
    if (folder / f"{PUBLISHER}.nk").exists() or not public.exists():
        private(public, _key(folder / f"{PUBLISHER}.nk").public + "\n")


def adopt_publisher(folder: Path, source: Path) -> None:
    """Accept the versions that another folder's publisher signs: a region's folder gets its hub's public key. Does
    nothing when there is none."""
    public_key = source / f"{PUBLISHER}.pub"
    if public_key.exists():
        (folder / f"{PUBLISHER}.nk").unlink(missing_ok=True)
        private(folder / f"{PUBLISHER}.pub", public_key.read_text(encoding="ascii"))


def _key(path: Path) -> Key:
    """The key of a seed file. A missing or unreadable file gets a new key."""
    try:
        return Key.parse(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        key = Key.make()
        private(path, key.seed + "\n")
        return key


def private(path: Path, text: str) -> None:
    """Write a file atomically, with mode 0600 from its creation on."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
    scratch.replace(path)


def main() -> None:
    """Make the credentials of a broker that an operator starts by hand."""
    parser = argparse.ArgumentParser(prog="python -m headrace.bus.broker.credentials", description="keys and users")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("credentials"))
    parser.add_argument("--run", action="append", default=[], help="give this run an account of its own (repeatable)")
    parser.add_argument(
        "--trust", action="append", default=[], type=Path, metavar="FILE",
        help=f"accept the records of a region's roles: the region's {WRITERS} (repeatable)",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        for file in args.trust:
            for folder in [args.folder / run for run in accounts(args.folder)] or [args.folder]:
                trust(folder, file, REGIONAL)
    except BusError as error:
        parser.error(str(error))
    try:
        write_accounts(args.folder, args.run) if args.run else write(args.folder)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
