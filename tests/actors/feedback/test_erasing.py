"""Mutated records neither stop a purge nor keep what they hold of the purged user."""

import asyncio
from typing import Any

import pytest
from msgspec import msgpack

from headrace.actors.feedback.erasing import Eraser, mentions
from headrace.bus.connection import Bus
from headrace.bus.runtime import dead_letters
from headrace.ledger.lost_attempts import LostAttempt, lost_attempt
from headrace.messages.codec import encode
from headrace.messages.operations import DeadLetter, Event
from headrace.messages.subjects import DLQ, EVENT, token
from tests.conftest import Connect
from tests.support import mutations
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

RUN, USER = "erased", "abcdef0123456789abcd"
LZ4 = {"Hr-Encoding": "lz4"}
TYPE = {"Hr-Type": "dead_letter/1"}


def letter(**fields: Any) -> DeadLetter:
    payload, headers = encode(Event(kind="test", text=f"my prompt, {USER} " * 400, run=RUN, actor="a", id="a-1"))
    assert headers["Hr-Encoding"] == "lz4", "only its own headers show what the payload holds"
    base: dict[str, Any] = {
        "stream": "HR_TASK",
        "consumer": "c",
        "stream_seq": 1,
        "subject": "s",
        "type": "event",
        "reason": "unusable",
        "deliveries": 1,
        "headers": headers,
        "payload": payload,
    }
    return DeadLetter(**(base | fields))


def hostile() -> list[tuple[bytes, dict[str, str]]]:
    """Payloads and headers of records on HR_DLQ that all hold the user."""
    whole, headers = encode(letter(reason=f"{USER} " * 400, payload=b"\0", headers=LZ4))
    assert headers["Hr-Encoding"] == "lz4", "the record is compressed, and its payload cannot be"
    fields: dict[str, Any] = msgpack.decode(msgpack.encode(letter()))
    plain = msgpack.encode(fields | {"reason": USER})
    return [
        (whole, headers),
        encode(letter(stream="a" * 5000, consumer="b" * 5000)),
        encode(letter(stream="", consumer="x y\r\n>*.", headers=letter().headers | {"Nats-Msg-Id": f"{RUN}.g-²-1"})),
        (plain[:-40], TYPE),
        (plain, {"Hr-Type": "dead_letter/9"}),
        (plain, {"Hr-Type": "dead_letter/²"}),
        (plain, TYPE | LZ4),
        (plain, TYPE | {"Hr-Encoding": "zip"}),
        (plain, {}),
        (msgpack.encode(fields | {"headers": {"Hr-Type": 1}, "reason": USER}), TYPE),
        (msgpack.encode(fields | {"stream_seq": -1, "reason": USER}), TYPE),
        (f"{USER}".encode() + b"\x91" * 100_000, TYPE),
    ]


async def test_a_purge_goes_through_every_mutated_record(connect: Connect) -> None:
    admin, feedback = await connect(), await connect("feedback")
    where = DLQ.at(stream="hr_task", consumer="c")
    start = await admin.last_seq("HR_DLQ") + 1
    for record in mutations.mutations(RUN, seed=3):
        if record.headers.get("Hr-Type", "").startswith(("dead_letter", "rejected", "letter_settled", "tool_log")):
            await admin.connection.send(record.subject, record.payload, record.headers)
    for payload, headers in hostile():
        await admin.publish_raw(where, payload, headers)
    noted = Event(kind="test", text=USER, run=RUN, actor="a", id="a-1")
    await admin.publish(EVENT.at(run=RUN, actor="a", type="event"), noted)
    eraser = Eraser(feedback, RUN, USER)
    async with asyncio.timeout(PATIENCE_S):
        assert await eraser.erase() == len(hostile()) + 1
        assert await eraser.erase() == 0, "the copies name nobody"
    left = [record async for record in admin.records("HR_DLQ", DLQ.where(), start=start)]
    assert not any(mentions(bytes(record.data), record.headers, USER) for record in left)
    assert sum(record.headers.get("Hr-Id", "").startswith("purged-") for record in left) == 3
    assert {record.subject for record in left if record.headers.get("Hr-Id", "").startswith("purged-")} == {where}


async def test_a_letter_of_a_stream_with_a_long_name_is_stored(connect: Connect) -> None:
    """A copy of a rejected message names its stream; the broker closes a connection over a subject of 4 KiB."""
    bus: Bus = await connect("dead_letter")
    long = letter(stream="a" * 5000, consumer="B" * 5000, stream_seq=7)
    seq = await asyncio.wait_for(dead_letters.publish(bus, long), PATIENCE_S)
    stored = (await dead_letters.entries(bus))[-1]
    assert (stored.seq, stored.letter) == (seq, long) and token("a" * 5000) == "a" * 200


@pytest.mark.parametrize(
    "id, attempt",
    [
        (f"{RUN}.g1-0-1", LostAttempt(RUN, "g1", 0, 1)),
        (f"{RUN}.u.g1-7-12.h3.r1", LostAttempt(RUN, "u.g1", 7, 12)),
        (f"{RUN}.g1-²-1", None),
        (f"{RUN}.g1-1-१", None),
        (f"{RUN}.g1-1-{'9' * 5000}", None),
        (f"{RUN}.g1", None),
        ("", None),
    ],
)
def test_the_id_of_an_unreadable_request_names_its_attempt(id: str, attempt: LostAttempt | None) -> None:
    assert lost_attempt(letter(payload=b"", headers={"Nats-Msg-Id": id})) == attempt
