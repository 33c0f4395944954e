"""Files of node 0 for the processes of other nodes, which share no folder with it.

The idea: a process of another node sends its reads and writes to one partner among the processes of node 0, which
answers after its own. Pieces are small, so no process holds another's rows. Both read and write the same bytes that
they would in the file itself, so a file does not depend on the number of nodes.

Every copy of the state is read and written by copy 0 alone, so all processes here are of one copy (`PeerGroup.near`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.messages.weights import TensorInfo
from headrace.weights import snapshot, state
from headrace.weights.state import Bits

Read = Callable[[str, int, int], Tensor]
"""A tensor's name, the first of its items or rows, and their number -> these."""


class Connection(Protocol):
    """The processes that hold one copy of the state: a `group.PeerGroup`."""

    rank: int
    size: int
    near: int
    """Number of those on node 0, which are the first ones."""

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """A message to one process, which waits for it. RuntimeError when it has ended."""

    def receive(self, rank: int, kind: Any) -> Any:
        """Wait for a message of one process, of a union of these types. RuntimeError, GroupError for other bytes."""


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Bits for a file."""

    tensor: int
    start: int
    data: bytes


class FilesWanted(msgspec.Struct, frozen=True, tag=True):
    """A call of a `Read`."""

    name: str
    first: int
    count: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """There is no more."""


class FilesAnswer(msgspec.Struct, frozen=True):
    """The result of a `Read`."""

    rows: Tensor


class FarRows:
    """A `snapshot.Rows` that can only be written, in a process of another node."""

    def __init__(self, peers: Connection) -> None:
        self._peers = peers

    def write(self, tensor: int, start: int, part: Bits) -> None:
        """As `snapshot.Rows`."""
        if part.size:
            data = part.view(np.uint8).tobytes()
            self._peers.send(_partner(self._peers), Piece(tensor, start, data))


@contextmanager
def writing(
    peers: Connection, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]
) -> Iterator[snapshot.Rows | FarRows]:
    """The file to write to, which has its size already. On leaving, what processes of other nodes have written through
    this one is in the file too. An OSError of the caller's own writing is raised after that."""
    if peers.rank >= peers.near:
        try:
            yield FarRows(peers)
        finally:
            peers.send(_partner(peers), Done())
        return
    file: snapshot.Rows | None = None
    try:
        file = snapshot.Rows(path, described, about)
        yield file
    finally:
        try:
            _hear(peers, described, file)
        finally:
            if file is not None:
                file.close()


def _hear(peers: Connection, described: Sequence[TensorInfo], file: snapshot.Rows | None) -> None:
    """Write what other nodes send, also where nothing can be written: they wait until it is received. OSError after
    all of it."""
    failed: OSError | None = None
    for rank in _clients(peers):
        while isinstance(piece := peers.receive(rank, Piece | Done), Piece):
            if file is None or failed is not None:
                continue
            bits = np.frombuffer(piece.data, state.unsigned(described[piece.tensor].dtype))
            try:
                file.write(piece.tensor, piece.start, bits)
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed


@contextmanager
def reading(peers: Connection, read: Read | None) -> Iterator[Read]:
    """Reads of a file of node 0. read: None in a process of another node. On leaving, the reads of other nodes are
    answered."""
    if read is None:
        partner = _partner(peers)

        def asked(name: str, first: int, count: int) -> Tensor:
            peers.send(partner, FilesWanted(name, first, count))
            rows: Tensor = peers.receive(partner, FilesAnswer).rows
            return rows

        yield asked
        peers.send(partner, Done())
        return
    yield read
    for rank in _clients(peers):
        while isinstance(wanted := peers.receive(rank, FilesWanted | Done), FilesWanted):
            rows = read(wanted.name, wanted.first, wanted.count)
            peers.send(rank, FilesAnswer(rows.detach().to(torch.device("cpu"))))


def _partner(peers: Connection) -> int:
    return peers.rank % peers.near


def _clients(peers: Connection) -> range:
    """The processes of other nodes that this one serves."""
    return range(peers.rank + peers.near, peers.size, peers.near)
