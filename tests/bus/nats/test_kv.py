"""Key-value buckets: typed values, revisions as fencing tokens, watching, lapsing."""

import asyncio
from secrets import token_hex

import pytest

from headrace.bus.errors import BusError, WrongSequence
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.connection import NatsConnection
from headrace.messages.operations import Ack, Ping
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def key() -> str:
    return f"trainer.k{token_hex(4)}.x"


async def test_put_get_update_delete(connect: Connect) -> None:
    kv, here = await (await connect()).kv("HR_ADMISSION"), key()
    assert await kv.get(here) is None
    first = await kv.put(here, Ack(detail="1"))
    assert await kv.get(here) == (Ack(detail="1"), first)
    second = await kv.update(here, Ack(detail="2"), first)
    with pytest.raises(WrongSequence):
        await kv.update(here, Ack(detail="zombie"), first)
    assert await kv.get(here) == (Ack(detail="2"), second)
    with pytest.raises(WrongSequence):
        await kv.delete(here, first)
    await kv.delete(here, second)
    assert await kv.get(here) is None


async def test_create_is_a_lock_that_can_be_taken_again_after_a_delete(connect: Connect) -> None:
    kv, here = await (await connect()).kv("HR_ADMISSION"), key()
    first = await kv.create(here, Ack(detail="mine"))
    with pytest.raises(WrongSequence) as caught:
        await kv.create(here, Ack(detail="yours"))
    assert caught.value.last == first
    await kv.delete(here)
    assert await kv.create(here, Ack(detail="yours")) > first
    results = await asyncio.gather(*(kv.create(f"{here}.race", Ack()) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1


async def test_keys_and_items(connect: Connect) -> None:
    kv, prefix = await (await connect()).kv("HR_ADMISSION"), f"trainer.k{token_hex(4)}"
    assert await kv.keys(f"{prefix}.>") == []
    for name in ("b", "a", "c"):
        await kv.put(f"{prefix}.{name}", Ack(detail=name))
    await kv.put(f"{prefix}.a", Ack(detail="a again"))
    await kv.delete(f"{prefix}.c")
    assert await kv.keys(f"{prefix}.*") == [f"{prefix}.a", f"{prefix}.b"]
    items = await kv.items(f"{prefix}.*")
    assert {name: value for name, (value, _) in items.items()} == {
        f"{prefix}.a": Ack(detail="a again"),
        f"{prefix}.b": Ack(detail="b"),
    }


async def test_keys_that_are_written_during_a_pass_are_in_it(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors renew their entries all the time; a reader never takes one of them for missing."""
    kv, prefix = await (await connect()).kv("HR_ADMISSION"), f"trainer.k{token_hex(4)}"
    for name in ("a", "b", "c"):
        await kv.put(f"{prefix}.{name}", Ack(detail=name))
    measure = ordered_reader.last_seq

    async def renewed_meanwhile(connection: NatsConnection, stream: str) -> int:
        end = await measure(connection, stream)
        for name in ("b", "c"):
            await kv.put(f"{prefix}.{name}", Ack(detail=f"{name} again"))
        return end

    monkeypatch.setattr(ordered_reader, "last_seq", renewed_meanwhile)
    values = [value for value, _ in (await kv.items(f"{prefix}.*")).values()]
    assert sorted(values, key=str) == [Ack(detail="a"), Ack(detail="b again"), Ack(detail="c again")]


async def test_watch_gives_the_last_state_then_every_change(connect: Connect) -> None:
    writer, reader = await connect(), await connect("rollout")
    kv, prefix = await writer.kv("HR_ADMISSION"), f"trainer.k{token_hex(4)}"
    await kv.put(f"{prefix}.a", Ack(detail="old"))
    await kv.put(f"{prefix}.a", Ack(detail="1"))
    await kv.put(f"{prefix}.b", Ping(note="b"))
    seen = []
    async for name, value, _ in (await reader.kv("HR_ADMISSION")).watch(f"{prefix}.*"):
        seen.append((name.removeprefix(f"{prefix}."), value))
        if len(seen) == 2:
            await kv.put(f"{prefix}.a", Ack(detail="2"))
            await kv.delete(f"{prefix}.b")
        if len(seen) == 4:
            break
    assert seen == [("a", Ack(detail="1")), ("b", Ping(note="b")), ("a", Ack(detail="2")), ("b", None)]


async def test_a_watch_on_an_empty_bucket_waits_for_the_first_value(connect: Connect) -> None:
    bus = await connect()
    kv, here = await bus.kv("HR_LEASE"), key()

    async def first() -> object:
        async for name, value, _ in kv.watch(here):
            return name, value
        return None

    task = asyncio.create_task(first())
    await bus.connection.flush()
    await kv.put(here, Ack(detail="x"))
    assert await asyncio.wait_for(task, PATIENCE_S) == (here, Ack(detail="x"))


async def test_an_unknown_bucket_is_named(connect: Connect) -> None:
    with pytest.raises(BusError, match="there is no bucket 'HR_NOTHING'; there are HR_ADMISSION"):
        await (await connect()).kv("HR_NOTHING")
