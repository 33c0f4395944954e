"""A node's part in handing full snapshots on, by the ``[weights]`` section: what it serves, and where it looks."""

import hashlib
import hmac
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace import secret_files
from headrace.messages.weights import HeldFile, WeightPeer, peer_key
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.transfer.fetching import Tell
from headrace.weights.transfer.full_snapshots import FullSnapshots, Look, in_shared, in_stores

if TYPE_CHECKING:
    from headrace.messages.base import Message

SECRET_FILE = "weight_peers.key"
"""A file in the credentials folder: the secret that all nodes of a run share."""


class Section(Protocol):
    """The part of ``[weights]`` that is needed here."""

    @property
    def full_snapshots(self) -> str:
        """broker, peer or file."""

    @property
    def shared_dir(self) -> str:
        """For file."""

    @property
    def peer_host(self) -> str:
        """Where files are served."""

    @property
    def peer_port(self) -> int:
        """0 takes a free one."""

    @property
    def peer_address(self) -> str:
        """Under which other nodes reach this one; empty: `peer_host`."""

    @property
    def peer_turns(self) -> int:
        """Most nodes of a region that fetch from other regions at once."""

    @property
    def region(self) -> str:
        """Of this node."""


class KeyValue(Protocol):
    """The bucket HR_NODES, as `peers.KeyValue`, and its unconditional write."""

    async def put(self, key: str, message: "Message") -> int:
        """Write, whatever the previous value."""

    async def create(self, key: str, message: "Message") -> int:
        """Write if there is no such key."""

    async def update(self, key: str, message: "Message", revision: int) -> int:
        """Write if the entry still has that revision."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove a key."""

    async def items(self, pattern: str = ">") -> "dict[str, tuple[Message, int]]":
        """Key to value and revision."""


def secret(credentials: Path | None, run: str) -> str:
    """The secret that nodes of a run share: by the run, because runs may share the file. secret_files.SecretError, with
    the remedy, when the folder has none."""
    folder = credentials if credentials is None or credentials.is_dir() else credentials.parent
    path = (folder or Path()) / SECRET_FILE
    if folder is None or not path.exists():
        raise secret_files.SecretError(
            f"[weights] full_snapshots = 'peer' needs the secret that nodes share, and there is no {path}: complete "
            f"the folder with `python -m headrace.bus.broker.credentials FOLDER` and copy the file to every node"
        )
    shared = secret_files.token(str(path), "[weights] full_snapshots")
    return hmac.new(shared.encode(), run.encode(), hashlib.sha256).hexdigest()


class ServedStore:
    """A store whose files are served to other nodes, and named in HR_NODES. Call `start`, and `close` in any case."""

    def __init__(self, store: SnapshotStore, values: KeyValue, section: Section, run: str, node: str, actor: str):
        """actor: names the store among those of the node. node, actor: tokens of a subject."""
        self._store, self._values, self._section = store, values, section
        self._run, self._node, self._key = run, node, peer_key(run, node, actor)
        self._files: Sequence[HeldFile] | None = None
        self._closed = False
        self.url = ""

    async def start(self, token: str, port: int) -> None:
        """Serve and name what the store holds. OSError when the port is taken."""
        from headrace.weights.transfer.serving import FileServer  # aiohttp takes a tenth of a second to import

        self._server = FileServer(self._store.find, token)
        await self._server.start(self._section.peer_host, port)
        host = self._section.peer_address or self._section.peer_host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"
        await self.name_files()

    async def name_files(self) -> None:
        """Name the files that the store holds now, where they have changed."""
        files = self._store.files()
        if self._closed or files == self._files:
            return
        entry = WeightPeer(
            run=self._run, node=self._node, region=self._section.region, url=self.url, files=tuple(files)
        )
        await self._values.put(self._key, entry)
        self._files = files

    async def close(self) -> None:
        """Name nothing any more, and stop serving."""
        self._closed = True
        try:
            if self._files is not None:
                await self._values.delete(self._key)
        finally:
            await self._server.close()


def fetcher(
    section: Section,
    values: KeyValue,
    refused: type[Exception],
    run: str,
    node: str,
    tell: Tell,
    *,
    token: str = "",
    own: str = "",
    stores: Path | None = None,
    takes_turns: bool = True,
) -> FullSnapshots | None:
    """The places of detached full snapshots for this node; None where neither the section nor an argument names one.

    refused: raised by `values` when another node was faster. token: asks peers, with this secret. own: address of this
    node's own files. stores: a run's folder of nodes on this machine, to look there first. takes_turns: False for
    a role that may not write the region's turns.
    """
    looks: list[Look] = []
    where: list[str] = []
    if stores is not None:
        looks.append(in_stores(stores))
        where.append(f"the stores in {stores}/")
    if section.shared_dir:
        looks.append(in_shared(section.shared_dir, run))
        where.append(f"the shared folder {section.shared_dir}/{run}")
    if token:
        from headrace.weights.transfer.peers import Peers

        turns = section.peer_turns if takes_turns else 0
        peers = Peers(values, refused, run=run, node=node, region=section.region, token=token, turns=turns, own=own)
        looks += [peers.near, peers.anywhere]
        where.append("the nodes that HR_NODES names")
    return FullSnapshots(looks, " and ".join(where), tell) if looks else None


async def opened(
    section: Section,
    values: KeyValue,
    refused: type[Exception],
    run: str,
    node: str,
    tell: Tell,
    *,
    store: SnapshotStore,
    actor: str,
    port: int,
    credentials: Path | None,
) -> tuple[ServedStore | None, FullSnapshots | None]:
    """Start the `ServedStore` of an actor, where the section names peers, and open its `fetcher`. port: of the server,
    0 takes a free one. credentials: the folder with the secret of the run's nodes. SecretError; OSError when
    the port is taken, and then nothing is served."""
    served, shared = None, ""
    if section.full_snapshots == "peer":
        shared = secret(credentials, run)
        served = ServedStore(store, values, section, run, node, actor)
        try:
            await served.start(shared, port)
        except BaseException:
            await served.close()
            raise
    url = served.url if served is not None else ""
    return served, fetcher(section, values, refused, run, node, tell, token=shared, own=url)
