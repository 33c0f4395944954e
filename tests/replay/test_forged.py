"""Forged records change nothing that the audit counts, and the report names each of them."""

from secrets import token_hex

import msgspec
import pytest

from headrace.bus import signatures
from headrace.bus.broker import keys
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.signatures import FORGED
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import encode
from headrace.replay.audit import prove
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio


def history(run: str) -> list[tuple[str, Message]]:
    """A group of two slots that was trained in step 0: subject and record."""
    ledger, score = s.LEDGER.at(run=run, group="g1"), s.SCORE.at(run=run, judge="j1", group="g1")
    return [
        *((ledger, records.issued("g1", slot, run=run)) for slot in (0, 1)),
        *((score, records.score("g1", slot, trajectory_seq=slot + 1, run=run)) for slot in (0, 1)),
        (s.CLOSE.at(run=run, group="g1"), records.closed("g1", (0, 0, 1, 1), (1, 0, 2, 2), run=run)),
    ]


async def test_forged_records_change_no_figure_and_are_named(server: Server, connect: Connect) -> None:
    run, admin = f"r{token_hex(4)}", await connect("admin")
    for subject, record in history(run):
        await admin.publish(subject, record)
    before, _ = await prove(await connect("operator"), run)
    async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as forger:
        close, score = s.CLOSE.at(run=run, group="g1"), s.SCORE.at(run=run, judge="j1", group="g1")
        judge, rollout = keys.load(server.credentials, "judge"), keys.load(server.credentials, "rollout")
        curriculum = keys.load(server.credentials, "curriculum")
        assert judge is not None and rollout is not None and curriculum is not None
        dropped, good = records.dropped("g1", run=run), records.score("g1", 0, 1, trajectory_seq=9, run=run)
        await forger.publish(close, dropped)
        for key, signed_for, subject, record in (
            (judge, close, close, dropped),
            (rollout, score, score, good),
            (curriculum, s.CLOSE.at(run=f"{run}x", group="g1"), close, dropped),
        ):
            payload, headers = encode(record)
            headers = signatures.signed(key, signed_for, headers | {"Nats-Msg-Id": token_hex(8)}, payload)
            reply = await forger.connection.call(subject, payload, headers=headers)
            assert b"error" not in reply.data
    after, _ = await prove(await connect("operator"), run)
    assert after.forged == len(after.skipped) == 4 and all(FORGED in sentence for sentence in after.skipped)
    assert before.forged == 0 and before.issued == 2
    assert msgspec.structs.replace(after, forged=0, skipped=(), skipped_count=0) == before
