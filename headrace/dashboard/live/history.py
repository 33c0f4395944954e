"""Past records for the live page, in the shape in which the page folds live ones.

They come from streams that also hold users' records. The broker cannot restrict a direct get by subject, so this
process reads the streams and leaves users' records out unless the request has a token.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.nats.received import Received
from headrace.messages import subjects as s
from headrace.messages.base import Message

NEWEST = 20_000
"""Number of newest records of each stream that an answer contains, to bound the browser's memory."""
DROPPED = {
    "score": ("tests", "plugins", "judge_version"),
    "group_closed": ("slots",),
    "dead_letter": ("payload", "headers"),
}
"""Fields that the page does not show in its lists."""
EVENT_TYPES = ("event", "eval_result", "promotion")


async def records(bus: Bus, run: str, *, users: bool) -> list[dict[str, Any]]:
    """Ledger, scores, closings, events and dead letters of a run, oldest first in each stream."""
    out: list[dict[str, Any]] = []
    sources = (
        ("HR_LEDGER", (s.LEDGER.where(run=run), s.FAIL.where(run=run))),
        ("HR_SCORE", (s.SCORE.where(run=run), s.CLOSE.where(run=run))),
        ("HR_EVENT", tuple(s.EVENT.where(run=run, type=kind) for kind in EVENT_TYPES)),
        ("HR_DLQ", (s.DLQ.where(),)),
    )
    for stream, filters in sources:
        records = [received async for received in _newest(bus, stream, *filters)]
        out += [plain(received) for received in records if users or not belongs_to_a_user(received)]
    return out


async def steps(bus: Bus, run: str, after: int) -> dict[str, Any]:
    """The steps of a run after a sequence, the newest `NEWEST` at most, and the newest heartbeat of every actor.
    `last`: the sequence after which the next request should ask."""
    last, out = after, list[dict[str, Any]]()
    start = max(after + 1, await bus.last_seq("HR_STEP") - NEWEST)
    async for received in bus.history("HR_STEP", s.STEP.at(run=run), start=start):
        last = received.seq
        out.append(plain(received))
    for _, revision in (await (await bus.kv("HR_PRESENCE")).items(">")).values():
        with suppress(MessageGone):  # the actor has published its next one
            out.append(plain(await bus.get("KV_HR_PRESENCE", revision)))
    return {"records": out, "last": last}


async def _newest(bus: Bus, stream: str, *filters: str) -> AsyncIterator[Received[Any]]:
    start = max(1, await bus.last_seq(stream) - NEWEST)
    async for received in bus.history(stream, *filters, start=start):
        yield received


def belongs_to_a_user(received: Received[Any]) -> bool:
    """Whether a record, or the message that a dead letter is about, holds a user's data."""
    message = received.message
    subject = getattr(message, "subject", "")
    lane = getattr(message, "lane", "")
    return bool(s.owner(received.subject, message) or (subject and s.owner(subject)) or lane == "production") or (
        subject.split(".")[1:2] == ["task"] and ".production." in subject
    )


def plain(received: Received[Any]) -> dict[str, Any]:
    """A record as JSON: its fields, type, time, sequence."""
    message: Message = received.message
    kind = message.type_name
    fields: dict[str, Any] = msgspec.to_builtins(message, enc_hook=repr)
    for name in DROPPED.get(kind, ()):
        fields.pop(name, None)
    if kind == "dead_letter":
        fields["kind"] = fields.pop("type")
    return {**fields, "type": kind, "time": received.time, "seq": received.seq}
