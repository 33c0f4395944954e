"""The broker itself deletes the payloads of records that it deletes by age."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.ordered_reader import OrderedReader
from headrace.bus.nats.streams import config_of
from headrace.bus.runtime import dead_letters
from headrace.messages import subjects as s
from tests.conftest import CONNECT_S
from tests.support import records
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

AGE_S = 1
"""The shortest age whose payloads can expire: the broker counts a message's own lifetime in whole seconds."""


@pytest.fixture
async def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    """A broker with HR_DLQ, which keeps letters for `AGE_S`, and HR_BLOB. Each stores a marker in place of the last
    message of a subject that expires (``subject_delete_marker_ttl``), so that a reader sees the moment. The marker's
    lifetime is the shortest one, because the broker raises that of a message to it."""
    short = msgspec.structs.replace(s.STREAM["HR_DLQ"], max_age_s=float(AGE_S), duplicate_window_s=float(AGE_S))
    monkeypatch.setattr(s, "STREAMS", tuple(short if one.name == short.name else one for one in s.STREAMS))
    monkeypatch.setitem(s.STREAM, short.name, short)
    async with Server(tmp_path) as server:
        async with await Bus.connect(
            server.url, role="admin", credentials=server.credentials, timeout=CONNECT_S
        ) as bus:
            for stream in (short, s.STREAM["HR_BLOB"]):
                marking = {"allow_msg_ttl": True, "allow_rollup_hdrs": True, "subject_delete_marker_ttl": 10**9}
                config = config_of(stream, reserve=False, replicas=1) | marking
                await bus.connection.api(f"STREAM.CREATE.{stream.name}", config)
            yield bus


@pytest.mark.slow  # waits 2 s for the broker's clock
async def test_the_payload_of_a_dead_letter_expires_after_the_letter(admin: Bus) -> None:
    large = os.urandom(3 << 19)
    letter = msgspec.structs.replace(records.letter("m"), stream="HR_FEEDBACK", consumer="c", payload=large)
    await dead_letters.publish(admin, letter)
    assert [entry.letter for entry in await dead_letters.entries(admin)] == [letter]
    chunks = await admin.subjects("HR_BLOB", "hr.blob.>")
    assert len(chunks) == 2
    markers: dict[str, float] = {}

    async def expired(stream: str, filter: str, count: int) -> None:
        seen = 0
        async for message, info in OrderedReader(admin.connection, stream, (filter,)).messages():
            if (message.headers or {}).get("Nats-Marker-Reason") == "MaxAge":
                markers[message.subject] = info.time
                seen += 1
                if seen == count:
                    return

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(expired("HR_DLQ", s.DLQ.where(), 1), expired("HR_BLOB", "hr.blob.>", len(chunks)))
    gone = markers.pop(s.DLQ.at(stream="hr_feedback", consumer="c"))
    assert markers.keys() == set(chunks)
    assert min(markers.values()) >= gone, "no letter is stored whose payload is gone"
    assert await dead_letters.entries(admin) == []
