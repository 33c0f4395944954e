"""A version's file, written behind the next step: the bytes and the hash of the state, and little memory."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch

from headrace.messages.weights import TensorInfo
from headrace.policy.model import Model
from headrace.training.served import publication, runs
from headrace.training.served.publication import Contents, Publisher, path_of
from headrace.training.state import TrainerState
from headrace.weights import snapshot, state, tensor_state
from tests.support import world

T = TypeVar("T")


class Together:
    """Peers that are threads of this process."""

    def __init__(self, rank: int, values: list[object], all_here: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._all_here = rank, len(values), values, all_here
        self.near = self.size

    def writing(self, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]) -> snapshot.Rows:
        return snapshot.Rows(path, described, about)

    def gathered(self, value: T, kind: type[T]) -> list[T]:
        self._values[self.rank] = value
        self._all_here.wait(30.0)
        told = list(self._values)
        self._all_here.wait(30.0)
        return told  # type: ignore[return-value]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces and blocks, so that small tensors have several."""
    monkeypatch.setattr(publication, "PIECE", 96)
    monkeypatch.setattr(state, "BLOCK", 1024)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "bfloat16"},
        {"expert_format": "mxfp8", "dtype": "bfloat16"},
        {"expert_format": "nvfp4", "dtype": "bfloat16"},
    ],
)
def test_a_published_file_has_the_bytes_and_the_hash_of_the_state(tmp_path: Path, changed: dict[str, str]) -> None:
    net = Model(msgspec.structs.replace(world.POLICY, **changed), world.NUMERICS, seed=1)
    trainer_state = TrainerState(net, version=7)
    out = trainer_state.publish(tmp_path)
    digest = out.hashed.result()
    assert digest == trainer_state.hash()
    assert out.durable.result() == path_of(tmp_path, 7, digest)
    (file,) = tmp_path.iterdir()
    assert snapshot.file_hash(file) == digest == snapshot.Snapshot(file).metadata["state_hash"]
    assert all(torch.equal(value, trainer_state.published()[name]) for name, value in tensor_state.read(file).items())
    assert out.durable_s > 0.0
    trainer_state.settle(end=True)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("size", "threads"), [(2, 2), (3, 2), (2, 16)])
def test_blocks_of_several_processes_and_threads_get_the_hash_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, threads: int
) -> None:
    monkeypatch.setattr(snapshot, "threads", lambda: threads)
    whole = {"a": torch.randn(70, 33), "b": torch.randn(5), "c": torch.randn(4000).bfloat16()}
    described, whole_runs = runs.whole(world.POLICY, whole)
    values: list[object] = [None] * size
    all_here = threading.Barrier(size)

    def cut(rank: int) -> list[runs.ServedRun]:
        """The rows between two places that no block begins at."""
        out = []
        for run in whole_runs:
            begin, end = run.items * rank // size, run.items * (rank + 1) // size
            out.append(runs.ServedRun(run.name, begin, end - begin, noted(shifted(run, begin))))
        return out

    meeting = threading.Barrier(3)

    def noted(read: Callable[[int, int], state.Bits]) -> Callable[[int, int], state.Bits]:
        def call(start: int, count: int) -> state.Bits:
            if threads > 2 and start == 0:
                meeting.wait(30.0)  # two processes alone read two runs at once
            return read(start, count)

        return call

    publishers = [Publisher(Together(rank, values, all_here)) for rank in range(size)]
    told = [
        publisher.start(tmp_path, 3, lambda rank=rank: Contents(described, cut(rank)))  # type: ignore[misc]
        for rank, publisher in enumerate(publishers)
    ]
    assert {one.hashed.result() for one in told} == {tensor_state.state_hash(whole)}
    assert snapshot.file_hash(told[0].durable.result()) == tensor_state.state_hash(whole)
    for publisher in publishers:
        publisher.close()


def shifted(run: runs.ServedRun, by: int) -> Callable[[int, int], state.Bits]:
    return lambda start, count: run.read(start + by, count)


def test_rows_that_no_process_holds_are_an_error_and_leave_no_file(tmp_path: Path) -> None:
    described, whole_runs = runs.whole(world.POLICY, {"a": torch.randn(70, 33)})
    publisher = Publisher(Together(0, [None], threading.Barrier(1)))
    out = publisher.start(tmp_path, 3, lambda: Contents(described, [whole_runs[0]._replace(items=2000)]))
    with pytest.raises(state.WeightError, match="hold 8000 bytes of a version, expected 9240"):
        out.hashed.result()
    assert isinstance(out.durable.exception(), state.WeightError)
    assert not list(tmp_path.iterdir())
    publisher.close()


def test_a_folder_that_cannot_be_written_is_an_error_of_both_results(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer_state = TrainerState(world.model())
    out = trainer_state.publish(tmp_path / "file")
    assert isinstance(out.hashed.exception(), OSError) and isinstance(out.durable.exception(), OSError)
    assert out.copied.is_set(), "the next update does not wait for it"
    trainer_state.settle(end=True)


class Seen(threading.Event):
    """An event that tells when somebody begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


CHANGES: dict[str, Callable[[TrainerState], None]] = {
    "update": lambda changed: changed.apply(1e-2),
    "rollback": lambda changed: changed.restore(TrainerState(world.model(1)).tensors(), version=0, step=0),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_waits_until_the_weights_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer_state = TrainerState(world.model())
    before, contents, seen = trainer_state.hash(), trainer_state.contents, Seen()

    def late() -> Contents:
        """Read after the change has begun to wait: one that does not wait changes what is read."""
        assert seen.awaited.wait(30.0), "the change did not wait"
        return contents()

    monkeypatch.setattr(trainer_state, "contents", late)
    out = trainer_state.publish(tmp_path)
    out.copied = seen
    for parameter in trainer_state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(CHANGES[kind], trainer_state)
        assert out.hashed.result() == before
        changing.result()
    assert trainer_state.hash() != before
    trainer_state.settle(end=True)


def test_publishing_adds_less_memory_than_two_fifths_of_the_file(tmp_path: Path) -> None:
    """Rows that are cast when they are read, as a rank's masters are."""
    masters = torch.ones(48 << 20)
    publisher = Publisher(Together(0, [None], threading.Barrier(1)))

    def written(version: int, items: int) -> Path:
        info = TensorInfo("a", "BF16", (items,))
        read = runs.of(world.POLICY, "a", 0, items, lambda start, count: masters[start : start + count].bfloat16())
        return publisher.start(tmp_path, version, lambda: Contents((info,), read)).durable.result()

    written(0, 3 << 20)  # threads and their allocators exist afterwards
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = resident("VmRSS")
    path = written(1, len(masters))
    added = resident("VmHWM") - before
    assert added < 0.4 * path.stat().st_size, f"{added >> 20} MiB"
    publisher.close()


def resident(key: str) -> int:
    """Bytes of a key of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize("call", ["copy", "writable"])
def test_a_copy_begins_with_the_next_forward_pass_or_before_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(publication, "GRACE_S", 3600.0)
    read = threading.Event()
    trainer_state = TrainerState(Model(world.POLICY, world.NUMERICS, seed=1))
    contents = trainer_state.contents

    def observed() -> Contents:
        read.set()
        return contents()

    monkeypatch.setattr(trainer_state, "contents", observed)
    out = trainer_state.publish(tmp_path)
    assert not read.is_set() and not out.copied.is_set()
    getattr(trainer_state, call)()
    assert out.durable.result(30.0).exists() and read.is_set()
    trainer_state.settle(end=True)


def test_a_copy_begins_soon_where_no_forward_pass_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "GRACE_S", 0.01)
    trainer_state = TrainerState(Model(world.POLICY, world.NUMERICS, seed=1))
    assert trainer_state.publish(tmp_path).durable.result(30.0).exists()
    trainer_state.settle(end=True)
