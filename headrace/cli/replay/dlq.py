"""`headrace dlq`: the letters that nobody could deliver, of a run that goes on or of one that is over.

`list` and `show` read, also the store of a finished run. `retry` sends a message again and needs a broker that lives.
`drop` only writes down that a person has seen enough of it: the letter stays, because the books are made of it.
"""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.bus.dead_letters import Filed

SHOWN_BYTES = 2000
"""Bytes of a payload's fields that `show` spells out when they are text."""


async def dlq(args: argparse.Namespace) -> int:
    """Run the parsed command."""
    from headrace.launch.commands import bus_of

    folder = runs.find(args.run)
    if args.dlq_command == "retry":
        _require_broker(folder)
    async with bus_of(folder) as bus:
        if args.dlq_command == "list":
            return await _list(bus, folder.id, everything=args.all)
        if args.dlq_command == "show":
            return await _show(bus, args.letter)
        return await _settle(bus, args)


def _require_broker(folder: RunDir) -> None:
    """RunError where nobody would take what is sent."""
    from headrace.bus.server import running
    from headrace.config import Config, load

    config = load(folder.config) if folder.config.is_file() else Config()
    if not config.bus.url and running(folder.broker) is None:
        raise RunError(f"run {folder.id} is over, nobody would take the message: a letter is retried while it runs", 4)


async def _list(bus: "Bus", run: str, *, everything: bool) -> int:
    """A line per letter: open ones of the run, or all that the broker has."""
    from headrace.bus.dead_letters import filed, key_of, run_of

    for entry in await filed(bus):
        letter = entry.letter
        if not everything and (entry.settled is not None or run_of(letter) not in ("", run)):
            continue
        state = entry.settled.how if entry.settled is not None else "open"
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.time))
        reason = " ".join(letter.reason.split())
        say(f"{entry.seq:6}  {moment}  {state:<8}{letter.type or '?':<18}{key_of(letter)}  {reason}")
    return 0


async def find(bus: "Bus", name: str) -> "Filed":
    """A letter by its number, or by its key <stream>/<consumer>/<sequence>. RunError when there is none."""
    from headrace.bus.dead_letters import filed, key_of

    entries = await filed(bus)
    for entry in reversed(entries):
        if name in (str(entry.seq), key_of(entry.letter)):
            return entry
    have = f"there are {', '.join(str(entry.seq) for entry in entries[-8:])}" if entries else "there are none"
    raise RunError(f"there is no letter {name!r}; {have}", 1)


async def _show(bus: "Bus", name: str) -> int:
    from headrace.bus.dead_letters import key_of
    from headrace.messages.codec import UnknownType, decode

    entry = await find(bus, name)
    letter = entry.letter
    try:
        message = msgspec.to_builtins(decode(letter.payload, letter.headers), builtin_types=(bytes,))
    except UnknownType as error:
        message = f"unreadable: {error}"
    shown = {
        "letter": entry.seq,
        "key": key_of(letter),
        "time": entry.time,
        **{name: getattr(letter, name) for name in letter.__struct_fields__ if name != "payload"},
        "settled": msgspec.to_builtins(entry.settled) if entry.settled is not None else None,
        "payload_bytes": len(letter.payload),
        "message": plain(message),
    }
    say(json.dumps(shown, indent=2))
    return 0


def plain(value: Any) -> Any:
    """Builtins as JSON takes them: bytes as text where they are some and not many, else by their number."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        return text if len(value) <= SHOWN_BYTES and text.isprintable() | ("\n" in text) else f"<{len(value)} bytes>"
    return value


async def _settle(bus: "Bus", args: argparse.Namespace) -> int:
    """Retry or drop; a letter is settled once."""
    from headrace.bus.dead_letters import resend, settle

    for name in args.letter:
        entry = await find(bus, name)
        if entry.settled is not None:
            raise RunError(f"letter {entry.seq} was {entry.settled.how} already; `dlq list --all` shows it", 1)
        if args.dlq_command == "drop":
            await settle(bus, entry, "dropped", note=args.note)
            say(f"letter {entry.seq} is dropped")
            continue
        sent = await resend(bus, entry)
        await settle(bus, entry, "retried", sent, args.note)
        say(f"letter {entry.seq} is {entry.letter.stream} #{sent} now")
        if await superseded(bus, entry):
            complain(f"letter {entry.seq}: its attempt was issued again since, so the books will not count this one")
    return 0


async def superseded(bus: "Bus", entry: "Filed") -> bool:
    """Whether a later attempt at the letter's slot was issued."""
    from headrace.messages.ledger import SlotIssued
    from headrace.messages.subjects import LEDGER
    from headrace.replay import letters

    lost = letters.lost(entry.letter)
    if lost is None:
        return False
    async for received in bus.history("HR_LEDGER", LEDGER.at(run=lost.run, group=lost.group)):
        issued = received.message
        if isinstance(issued, SlotIssued) and issued.slot == lost.slot and issued.attempt > lost.attempt:
            return True
    return False
