"""Payloads that lie in a folder of the node: read from there, found elsewhere, safe from crashes and from others."""

import asyncio
import os
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, MessageGone
from headrace.bus.payloads.shared_memory import FROM, LARGE, SharedMemoryStore, Upload
from headrace.config import Bus as Section
from headrace.messages.base import Array
from headrace.messages.operations import BlobRef
from headrace.messages.rollout import Span, Turn, TurnSampled
from headrace.messages.subjects import TURN
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


def turn(where: str, size: int = 2 * FROM) -> TurnSampled:
    """One that does not compress."""
    routed = Array("|u1", (size,), os.urandom(size))
    few = Turn(
        index=0,
        segment=0,
        prompt_ids=Array.of([1], "<i4"),
        ids=Array.of([2], "<i4"),
        logprobs=Array.of([-1.0], "<f4"),
        routed=routed,
        spans=(Span(0, 1, 0),),
    )
    _, _, run, trajectory = where.split(".", 3)
    return TurnSampled(run=run, trajectory=trajectory, turn=few)


def place() -> str:
    return TURN.at(run=f"r{token_hex(4)}", trajectory="g1-0-0")


async def with_folder(connect: Connect, folder: Path, upload: Upload) -> Bus:
    bus = await connect("rollout")
    bus.use_shared_memory(
        SharedMemoryStore.from_config(Section(blob_dir=str(folder), blob_upload=upload), "r1", bus.node)
    )
    return bus


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "headrace-r1").iterdir() if path.name not in ("pending", ".lock")]


async def test_a_reader_on_the_node_needs_no_broker_for_the_payload(connect: Connect, tmp_path: Path) -> None:
    writer, reader = await with_folder(connect, tmp_path, "never"), await with_folder(connect, tmp_path, "never")
    where = place()
    admin = await connect("admin")
    before, message = await admin.last_seq("HR_BLOB"), turn(where)
    seq = await writer.publish(where, message)
    assert (await reader.get("HR_TURN", seq)).message == message
    assert await admin.last_seq("HR_BLOB") == before
    assert [oct(path.stat().st_mode & 0o777) for path in files(tmp_path)] == ["0o400"]
    small = await writer.publish(where, turn(where, 100))
    assert (await (await connect("rollout")).get("HR_TURN", small)).message.turn.routed.shape == (100,)
    assert len(files(tmp_path)) == 1, "a small one travels on the bus itself"


async def test_another_node_waits_for_the_upload(connect: Connect, tmp_path: Path) -> None:
    writer, elsewhere, where = await with_folder(connect, tmp_path, "after"), await connect("rollout"), place()
    message = turn(where, 3 << 20)
    seq = await writer.publish(where, message)
    reading = asyncio.create_task(elsewhere.get("HR_TURN", seq))
    await writer.close()  # what is pending is uploaded before the connection goes
    assert (await reading).message == message
    assert not (tmp_path / "headrace-r1").exists(), "the last one to go removes what lies at the broker too"


async def test_the_next_process_uploads_what_a_dead_one_left(connect: Connect, tmp_path: Path) -> None:
    writer, where = await with_folder(connect, tmp_path, "after"), place()
    message = turn(where)
    seq = await writer.publish(where, message)
    assert writer._uploads is not None
    writer._uploads.cancel()
    await writer.connection.close()
    (tmp_path / "headrace-r1/.999999999-0").write_bytes(b"half a pay")
    successor = await with_folder(connect, tmp_path, "after")
    assert len(files(tmp_path)) == 1, "the dead one's half file is gone"
    assert successor.shared_memory is not None
    assert await successor.shared_memory.send(successor._store_chunk) == 1
    assert (await (await connect("rollout")).get("HR_TURN", seq)).message == message


async def test_the_folder_stays_while_anybody_uses_it(connect: Connect, tmp_path: Path) -> None:
    writer, other = await with_folder(connect, tmp_path, "before"), await with_folder(connect, tmp_path, "before")
    where = place()
    seq = await writer.publish(where, turn(where))
    await writer.close()
    assert len(files(tmp_path)) == 1
    assert (await other.get("HR_TURN", seq)).message.turn.index == 0
    await other.close()
    assert not (tmp_path / "headrace-r1").exists()
    only = await with_folder(connect, tmp_path, "never")
    await only.publish(where, turn(where))
    await only.close()
    assert len(files(tmp_path)) == 1, "the only copy"


async def test_what_is_not_what_its_name_says_is_thrown_away(connect: Connect, tmp_path: Path) -> None:
    writer, where = await with_folder(connect, tmp_path, "before"), place()
    message = turn(where)
    seq = await writer.publish(where, message)
    (file,) = files(tmp_path)
    file.chmod(0o600)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert (await writer.get("HR_TURN", seq)).message == message, "the broker's copy"
    assert files(tmp_path) == []


async def test_a_purged_one_is_gone_at_once(connect: Connect, tmp_path: Path) -> None:
    writer = await with_folder(connect, tmp_path, "never")
    where = place()
    seq = await writer.publish(where, turn(where))
    assert (
        writer.shared_memory is not None
        and writer.shared_memory.collect(before=files(tmp_path)[0].stat().st_mtime + 1) == 1
    )
    with pytest.raises(MessageGone, match="stored on"):
        _ = (await writer.get("HR_TURN", seq)).message


async def test_users_payloads_never_lie_there(connect: Connect, tmp_path: Path) -> None:
    writer = await with_folder(connect, tmp_path, "never")
    where = TURN.at(run="r1", trajectory="ab12.s1-0-0")
    await writer.publish(where, turn(where, 2 << 20))
    assert files(tmp_path) == []


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(BusError, match="mode 700"):
        SharedMemoryStore.open(tmp_path / "open", "after", "n")
    mine = SharedMemoryStore.open(tmp_path / "mine", "after", "n").folder
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(BusError, match="mode 700"):
        SharedMemoryStore.open(tmp_path / "link", "after", "n")


async def test_a_name_is_a_digest_and_no_path(tmp_path: Path) -> None:
    store = SharedMemoryStore.open(tmp_path / "mine", "after", "n")
    (tmp_path / "secret").write_bytes(b"x")
    assert await store.get(BlobRef(sha256="../secret", bytes=1, chunks=1, type="event/1", check="0" * 32)) is None
    assert (tmp_path / "secret").exists()


def test_only_what_is_uploaded_makes_room(tmp_path: Path) -> None:
    store = SharedMemoryStore.open(tmp_path / "mine", "after", "n")
    digests = [store._lay(os.urandom(1000))[0] for _ in range(3)]
    for age, digest in enumerate(reversed(digests)):
        os.utime(store.folder / digest, (1000.0 - age, 1000.0 - age))
    (store.pending / digests[1]).unlink()
    assert store.trim(capacity=0) == 1
    assert [digest for digest in digests if (store.folder / digest).exists()] == [digests[0], digests[2]]


@pytest.mark.parametrize("upload", ["never", "after"])
@pytest.mark.parametrize("size", [2 * FROM, LARGE + 1])
async def test_a_forged_reference_changes_nothing(tmp_path: Path, upload: Upload, size: int) -> None:
    store = SharedMemoryStore.open(tmp_path / "folder", upload, "n1")
    payload = os.urandom(size)
    true = await store.put(nowhere, payload, {"Hr-Type": "trajectory/1"})
    assert true is not None

    def there() -> set[tuple[str, int, int]]:
        paths = [path for path in store.folder.rglob("*") if path.is_file()]
        return {(str(path), path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}

    before = there()
    assert len(before) == (3 if upload == "after" else 2), "the payload, its name in pending, and the lock"
    other = "0" * 32
    for changes in ({"bytes": size - 1}, {"bytes": size + 1}, {"bytes": 0}, {"check": other}, {"check": "x"}):
        assert await store.get(msgspec.structs.replace(true, **changes)) is None
    for name in ("pending", ".lock", "..", "../folder", f"../folder/{true.sha256}", other):
        assert await store.get(msgspec.structs.replace(true, sha256=name)) is None
    assert there() == before
    found = await store.get(true)
    assert found is not None and bytes(found) == payload
    store.close()


async def nowhere(*_: object) -> int:
    raise AssertionError("nothing is uploaded here")
