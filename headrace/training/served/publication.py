"""Writes a version's file behind the next step: each process copies its own rows, hashes them on the way, and the first
one makes the file durable.

The idea: after an update the next forward pass only reads the weights, and so does the copy. So a thread of every
process copies while the next step computes its gradient; the next update waits for the copy (`Publication.copied`), and
the outcome of the step before waits for its hash. The durable file is needed later still, so fsync runs in a thread of
its own, while the next version may be copied already.

Between the update and the next forward pass several threads hand over to each other, and each waits for the interpreter
while another thread runs Python. So the copy begins when that forward pass has begun, or after `GRACE_S` where the
trainer waits for a batch.

Each process writes its rows into one preallocated file of node 0, from other nodes through a process there. It hashes a
block that it holds whole from the piece that it has just written. Blocks of several processes are assigned round-robin
over the processes of node 0 and read back from the file, which is in the page cache. So no process holds a whole
tensor, and the added memory is one piece per process. The hash is the one of `weights.state`, whatever the number of
processes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.messages.weights import TensorInfo
from headrace.training.parallel.interface import Peers, Writes
from headrace.training.served.runs import ServedRun
from headrace.weights import snapshot, state
from headrace.weights.state import HASH_BYTES

PIECE = 1 << 20
"""Elements that are copied at once: they stay in the processor's cache until they are hashed and written."""
GRACE_S = 0.1
"""Seconds after which a copy begins although no forward pass has begun."""
_UNKNOWN = "0" * (2 * HASH_BYTES)
"""The state hash in a file that is not complete; it has the length of every state hash."""


def path_of(folder: Path, version: int, state_hash: str) -> Path:
    """The file of a version."""
    return folder / f"v{version:08d}-{state_hash[:8]}.safetensors"


class Publication:
    """A version's file while it is written. Futures hold an OSError, a WeightError or, when another process has ended,
    a RuntimeError."""

    def __init__(self) -> None:
        self.hashed: Future[str] = Future()
        """The state hash, when all rows of all processes are in the file."""
        self.durable: Future[Path] = Future()
        """The file's path, once the file survives a loss of power; in the other processes, once all rows are in it."""
        for future in (self.hashed, self.durable):
            future.set_running_or_notify_cancel()  # a task that waits for it and is cancelled does not cancel it
        self.wanted = threading.Event()
        """Set when the copy may begin."""
        self.copied = threading.Event()
        """Set when this process's weights are not read again."""
        self.durable_s = 0.0
        """Seconds until it was durable; 0 for a file that existed."""
        self._started = time.perf_counter()

    @classmethod
    def existing(cls, path: Path, state_hash: str) -> "Publication":
        """The publication of a file that is complete."""
        out = cls()
        out.hashed.set_result(state_hash)
        out.durable.set_result(path)
        out.copied.set()
        return out

    def saved(self, path: Path) -> None:
        """The file is durable."""
        self.durable_s = time.perf_counter() - self._started
        self.durable.set_result(path)


class Contents(NamedTuple):
    """The tensors of a version, sorted by name, and this process's runs of them."""

    described: Sequence[TensorInfo]
    runs: Sequence[ServedRun]


class Publisher:
    """The threads that write versions behind the steps. All processes of a group publish the same versions in the same
    order."""

    def __init__(self, peers: Peers) -> None:
        """peers: a connection that no other thread uses."""
        self._peers = peers
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="copying")
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._open: list[Publication] = []

    def start(self, folder: Path, version: int, contents: Callable[[], Contents]) -> Publication:
        """Begin to write a version. contents: called in the copying thread; what it returns reads the weights."""
        out = Publication()
        self._open = [publication for publication in self._open if not publication.durable.done()] + [out]
        self._copying.submit(self._run, out, folder, version, contents)
        return out

    def settle(self) -> None:
        """Wait until every publication has ended, with a file or an error."""
        wait([publication.durable for publication in self._open])

    def close(self) -> None:
        """End the threads when all publications have ended."""
        self._copying.shutdown(wait=True)
        self._saving.shutdown(wait=True)

    def _run(self, out: Publication, folder: Path, version: int, contents: Callable[[], Contents]) -> None:
        draft: snapshot.Draft | None = None
        out.wanted.wait(GRACE_S)
        try:
            parts = contents()
            if self._peers.rank == 0:
                draft, why = _draft(path_of(folder, version, _UNKNOWN), parts.described)
            else:
                why = ""
            told, why = self._peers.gathered((str(draft.temporary) if draft else "", why), tuple[str, str])[0]
            if why:
                raise OSError(why)
            digest = self._copy(out, Path(told), parts)
        except BaseException as error:
            if draft is not None:
                draft.__exit__(None, None, None)
            for future in (out.hashed, out.durable):
                future.set_exception(error)
            return
        finally:
            out.copied.set()
        path = path_of(folder, version, digest)
        if draft is None:
            out.durable.set_result(path)
        else:
            self._saving.submit(self._save, out, draft, path, digest)
        out.hashed.set_result(digest)

    def _copy(self, out: Publication, path: Path, parts: Contents) -> str:
        """Write this process's rows; returns the state hash of all processes' rows."""
        peers, why, written = self._peers, "", 0
        hashes: dict[int, bytes] = {}
        about = {"state_hash": _UNKNOWN}
        try:
            with peers.writing(path, parts.described, about) as file:
                # The connection to another node takes one thread.
                threads = snapshot.threads() // (2 * peers.near) if peers.rank < peers.near else 1
                written = _write(file, parts, hashes, max(1, threads))
        except (OSError, state.WeightError) as error:
            why = str(error)
        out.copied.set()
        told = peers.gathered((written, hashes, why), tuple[int, dict[int, bytes], str])
        if failed := [why for _, _, why in told if why]:
            raise OSError(failed[0])
        size = sum(map(state.nbytes, parts.described))
        if (got := sum(written for written, _, _ in told)) != size:
            raise state.WeightError(f"the processes hold {got} bytes of a version, expected {size}")
        every = {block: digest for _, digests, _ in told for block, digest in digests.items()}
        count = sum(map(state.block_count, parts.described))
        shared = [block for block in range(count) if block not in every]
        read: dict[int, bytes] = {}
        if peers.rank < peers.near:
            with snapshot.Rows(path, parts.described, about) as written_file:
                read = _read_back(written_file, parts.described, set(shared[peers.rank :: peers.near]))
        for digests in peers.gathered(read, dict[int, bytes]):
            every |= digests
        return state.root(parts.described, b"".join(every[block] for block in range(count)))

    def _save(self, out: Publication, draft: snapshot.Draft, path: Path, digest: str) -> None:
        try:
            with draft:
                draft.describe({"state_hash": digest})
                # One fsync covers what every process of this machine has written to the file.
                draft.commit(path)
        except BaseException as error:
            out.durable.set_exception(error)
        else:
            out.saved(path)


def _draft(path: Path, described: Sequence[TensorInfo]) -> tuple[snapshot.Draft | None, str]:
    """A file to write to, or the reason for which there is none."""
    try:
        return snapshot.Draft(path, described, {"state_hash": _UNKNOWN}), ""
    except OSError as error:
        return None, str(error)


def _write(file: Writes, parts: Contents, hashes: dict[int, bytes], threads: int) -> int:
    """Write all runs and add the hashes of the blocks that they hold whole. Returns the number of bytes."""
    place = _places(parts.described)

    def one(run: ServedRun) -> int:
        tensor, first = place[run.name]
        written = 0
        for number, (start, count) in enumerate(state.blocks(parts.described[tensor])):
            begin, end = max(start, run.start), min(start + count, run.start + run.items)
            if begin >= end:
                continue
            digest = xxhash.xxh3_128()
            for at in range(begin, end, PIECE):
                part = run.read(at - run.start, min(PIECE, end - at))
                file.write(tensor, at, part)
                digest.update(part.data)
                written += part.nbytes
                del part  # two pieces at a time scatter the free memory: in one of ten versions 27 MiB more stayed
            if (begin, end) == (start, start + count):
                hashes[first + number] = digest.digest()
        return written

    if threads == 1:
        return sum(map(one, parts.runs))
    with ThreadPoolExecutor(threads, thread_name_prefix="writing") as pool:
        return sum(pool.map(one, parts.runs))


def _places(described: Sequence[TensorInfo]) -> dict[str, tuple[int, int]]:
    """Name to the index of the tensor and of its first block."""
    out, block = {}, 0
    for index, info in enumerate(described):
        out[info.name] = index, block
        block += state.block_count(info)
    return out


def _read_back(file: snapshot.Rows, described: Sequence[TensorInfo], wanted: set[int]) -> dict[int, bytes]:
    """The hashes of these blocks of a file in which all rows are written."""
    hashes: dict[int, bytes] = {}
    buffer = np.empty(PIECE * 4, np.uint8)
    block = 0
    for index, info in enumerate(described):
        kind = state.unsigned(info.dtype)
        for start, count in state.blocks(info):
            if block in wanted:
                digest = xxhash.xxh3_128()
                for at in range(start, start + count, PIECE):
                    part = buffer[: min(PIECE, start + count - at) * kind.itemsize].view(kind)
                    file.read(index, at, part)
                    digest.update(part.data)
                hashes[block] = digest.digest()
            block += 1
    return hashes
