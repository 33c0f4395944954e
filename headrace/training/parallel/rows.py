"""Writes and hashes tensors whose rows are in several processes; no process holds a whole tensor.

The idea: each process writes its own rows into one preallocated file and hashes the blocks that it holds whole. Bytes
of a block that two processes share go to the first of them, which hashes it. The hash is that of `weights.state`, so a
file does not depend on the number of processes that wrote it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from headrace.algorithms import adamw
from headrace.messages.weights import TensorInfo
from headrace.training import checkpoint
from headrace.training.parallel import far
from headrace.training.parallel.group import PeerGroup
from headrace.training.parallel.interface import Writes
from headrace.training.served.runs import ServedRun
from headrace.weights import snapshot, state, tensor_state
from headrace.weights.state import BLOCK, HASH_BYTES

ROUND_BYTES = 64 << 20
"""Approximate number of bytes of one exchange."""


class _Shared(NamedTuple):
    """A part of a block that is not in the process that hashes the block: rank `source` sends it to rank `owner`."""

    block: int
    tensor: int
    start: int
    items: int
    source: int
    owner: int


def hashes(described: Sequence[TensorInfo], runs: Sequence[ServedRun], world: PeerGroup) -> bytes:
    """The hashes of all blocks in order, 16 bytes each, in every process. All processes must call this. WeightError
    when no process holds a block."""
    mine = {run.name: run for run in runs}
    table = world.gathered([(run.name, run.start, run.items) for run in runs], list[tuple[str, int, int]])
    spans: list[dict[str, tuple[int, int]]] = [{name: (start, count) for name, start, count in part} for part in table]
    digests: dict[int, bytes] = {}
    open_blocks: dict[int, xxhash.xxh3_128] = {}
    waiting: list[_Shared] = []
    number = 0
    for index, info in enumerate(described):
        holders = [(rank, *part[info.name]) for rank, part in enumerate(spans) if info.name in part]
        run = mine.get(info.name)
        for start, count in state.blocks(info):
            pieces = [
                (rank, max(start, at), min(start + count, at + held))
                for rank, at, held in holders
                if max(start, at) < min(start + count, at + held)
            ]
            pieces.sort(key=lambda piece: piece[1])  # experts with owners are not in the order of ranks
            if not pieces and count:
                raise state.WeightError(f"{info.name}: no process holds elements {start} to {start + count}")
            owner = pieces[0][0] if pieces else 0
            if owner == world.rank:
                open_blocks[number] = xxhash.xxh3_128()
                if pieces and run is not None:
                    open_blocks[number].update(run.read(pieces[0][1] - run.start, pieces[0][2] - pieces[0][1]).data)
                if len(pieces) < 2:
                    digests[number] = open_blocks.pop(number).digest()
            waiting += [_Shared(number, index, first, end - first, rank, owner) for rank, first, end in pieces[1:]]
            number += 1
    for part in _rounds(waiting, described):
        _pass_on(part, described, mine, open_blocks, world)
    digests |= {block: digest.digest() for block, digest in open_blocks.items()}
    out = bytearray(number * HASH_BYTES)
    for told in world.gathered(digests, dict[int, bytes]):
        for block, digest_ in told.items():
            out[block * HASH_BYTES : (block + 1) * HASH_BYTES] = digest_
    return bytes(out)


def _rounds(waiting: Sequence[_Shared], described: Sequence[TensorInfo]) -> Iterator[list[_Shared]]:
    """The parts in exchanges of about ROUND_BYTES, the same in every process."""
    held: list[_Shared] = []
    size = 0
    for shared in waiting:
        held.append(shared)
        size += shared.items * state.itemsize(described[shared.tensor].dtype)
        if size >= ROUND_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _pass_on(
    part: Sequence[_Shared],
    described: Sequence[TensorInfo],
    runs: Mapping[str, ServedRun],
    open_blocks: Mapping[int, xxhash.xxh3_128],
    world: PeerGroup,
) -> None:
    """One exchange: bytes of shared blocks go to their owners, which hash them in the order of elements."""
    send: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
    sizes = [0] * world.size
    for shared in part:
        info = described[shared.tensor]
        if shared.source == world.rank:
            run = runs[info.name]
            raw = run.read(shared.start - run.start, shared.items)
            send[shared.owner].append(torch.from_numpy(raw.view("u1").copy()))
        if shared.owner == world.rank:
            sizes[shared.source] += shared.items * state.itemsize(info.dtype)
    empty = torch.empty(0, dtype=torch.uint8)
    got = world.exchange([torch.cat(pieces) if pieces else empty for pieces in send], sizes)
    at = [0] * world.size
    for shared in part:
        if shared.owner == world.rank:
            size = shared.items * state.itemsize(described[shared.tensor].dtype)
            begin = at[shared.source]
            open_blocks[shared.block].update(got[shared.source][begin : begin + size].numpy().data)
            at[shared.source] += size


def file_hashes(file: snapshot.Snapshot, world: PeerGroup) -> dict[int, bytes]:
    """The hashes of this process's share of a file's blocks, 16 bytes each, by number; the processes of node 0 divide
    them."""
    digests: dict[int, bytes] = {}
    number = 0
    for info in file.tensors:
        array = file.array(info)
        for start, count in state.blocks(info):
            if number % world.near == world.rank:
                digests[number] = state.block_hash(array[start : start + count])
            number += 1
    return digests


def write(
    path: Path, described: Sequence[TensorInfo], about: Mapping[str, str], runs: Sequence[ServedRun], world: PeerGroup
) -> None:
    """Write one safetensors file from the rows of all processes, atomically. All processes must call this. OSError in
    every process when one of them cannot write."""
    error = ""
    draft: snapshot.Draft | None = None
    with ExitStack() as held:  # also when another process dies: the draft is removed
        if world.rank == 0:
            try:
                draft = held.enter_context(snapshot.Draft(path, described, about))
            except OSError as refused:
                error = str(refused)
        told = world.gathered((str(draft.temporary) if draft else "", error), tuple[str, str])[0]
        if told[1]:
            raise OSError(told[1])
        error = ""
        try:
            with world.writing(Path(told[0]), described, about) as file:
                index = {info.name: number for number, info in enumerate(described)}
                for run in runs:
                    _copy(file, index[run.name], run)
        except OSError as refused:
            error = str(refused)
        errors = [text for text in world.gathered(error, str) if text]
        if draft is not None and not errors:
            draft.commit()  # one fsync covers what every process of this machine has written to the file
    world.gathered("", str)  # the file has its name when the first process returns, and in every other one as well
    if errors:
        raise OSError(errors[0])


def _copy(file: Writes, tensor: int, run: ServedRun) -> None:
    for start in range(0, run.items, BLOCK):
        count = min(BLOCK, run.items - start)
        file.write(tensor, run.start + start, run.read(start, count))


class RowSource:
    """A checkpoint's file in node 0, of which each process that holds a part of the copy reads its own rows."""

    def __init__(self, file: Path, cut: Callable[[TensorInfo], tuple[int, tuple[int, ...]]], world: PeerGroup) -> None:
        """cut: a tensor -> this process's first item of it, and the shape of its part. The processes of node 0 check
        the file's hash together. All processes must call this. CheckpointError."""
        near = world.rank < world.near
        mapped = checkpoint.opened(file) if near else None
        told = world.gathered(file_hashes(mapped, world) if mapped is not None else {}, dict[int, bytes])
        self._world, self._cut = world, cut
        self._tensors: Mapping[str, Tensor] = {}
        found: tuple[dict[str, str], tuple[TensorInfo, ...]] = ({}, ())
        if mapped is not None:
            digests = {block: digest for part in told for block, digest in part.items()}
            blocks = b"".join(digests[block] for block in range(len(digests)))
            checkpoint.check(file, mapped.metadata, state.root(mapped.tensors, blocks))
            self._tensors = tensor_state.read(file)
            found = dict(mapped.metadata), tuple(mapped.tensors)
        self.about, infos = world.gathered(found, tuple[dict[str, str], tuple[TensorInfo, ...]])[0]
        self._infos = {info.name: info for info in infos}

    def rows(self, kind: str) -> dict[str, Tensor]:
        """The rows of `state` or of the `guard`, on the CPU. All processes must call this. KeyError, ValueError for
        another model."""
        heads = ("guard.",) if kind == "guard" else ("master.", "frozen.", *(f"{each}." for each in adamw.KINDS))
        out: dict[str, Tensor] = {}
        with self._reading() as read:
            for name, info in self._infos.items():
                if name.startswith(heads):
                    start, shape = self._cut(info)
                    flat = read(name, start, torch.Size(shape).numel())
                    out[name.removeprefix("guard.")] = flat.clone().view(shape)
        return out

    @contextmanager
    def kept(self, version: int) -> Iterator[far.Read]:
        """Reads of items of a kept version's tensors. All processes must call this."""
        head = f"kept.{version}."
        with self._reading() as read:
            yield lambda name, first, count: read(head + name, first, count)

    def _reading(self) -> AbstractContextManager[far.Read]:
        return far.reading(self._world, self._items if self._world.rank < self._world.near else None)

    def _items(self, name: str, first: int, count: int) -> Tensor:
        return self._tensors[name].reshape(-1)[first : first + count]
