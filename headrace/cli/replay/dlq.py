"""`headrace dlq`: list, show, retry and drop the dead letters of a run.

`list` and `show` also read the store of a finished run. `retry` publishes a message again and needs an active broker.
`drop` records that an operator closed the entry; the dead letter stays in its stream, because the audit counts it.
"""

import argparse
import json
import time
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_run
from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.bus.runtime.dead_letters import DeadLetterEntry
    from headrace.cli.arguments import Commands

LETTER_HELP = "number, or STREAM/CONSUMER/SEQUENCE"


def add(commands: "Commands") -> None:
    """Declare the command and its subcommands."""
    parser = commands.add_parser("dlq", help="dead letters: messages that no actor could handle")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    listing = subcommands.add_parser("list", help="print a line per dead letter")
    add_run(listing)
    listing.add_argument("--all", action="store_true", help="include settled entries and those of other runs")
    entry = subcommands.add_parser("show", help="print everything about one dead letter as JSON")
    add_run(entry, optional=False)
    entry.add_argument("letter", help=LETTER_HELP)
    for name, text in (("retry", "publish messages again, to an active run"), ("drop", "close entries")):
        settling = subcommands.add_parser(name, help=text)
        add_run(settling, optional=False)
        settling.add_argument("letter", nargs="+", help=LETTER_HELP)
        settling.add_argument("--note", default="", help="reason, stored with the entry")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Run the parsed subcommand."""
    from headrace.launch.session import looped

    return looped(dlq(args))


async def dlq(args: argparse.Namespace) -> int:
    """Run the subcommand on the event loop."""
    from headrace.launch.session import bus_of

    folder = runs.find(args.run)
    if args.subcommand == "retry":
        _require_broker(folder)
    async with bus_of(folder) as bus:
        if args.subcommand == "list":
            return await _list(bus, folder.id, everything=args.all)
        if args.subcommand == "show":
            return await _show(bus, args.letter)
        return await _retry_or_drop(bus, args)


def _require_broker(folder: RunDir) -> None:
    """RunError if the run has no active broker."""
    from headrace.bus.broker.server import running
    from headrace.config import Config, load

    config = load(folder.config) if folder.config.is_file() else Config()
    if not config.bus.url and running(folder.broker) is None:
        raise RunError(
            f"run {folder.id} is over, so no actor would receive the message: `dlq retry` needs an active run", 4
        )


async def _list(bus: "Bus", run: str, *, everything: bool) -> int:
    """Print a line per dead letter: the run's open ones, or all that the broker has."""
    from headrace.bus.runtime.dead_letters import entries, key_of, run_of

    for entry in await entries(bus):
        letter = entry.letter
        if not everything and (entry.settled is not None or run_of(letter) not in ("", run)):
            continue
        state = entry.settled.how if entry.settled is not None else "open"
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.time))
        reason = " ".join(letter.reason.split())
        say(f"{entry.seq:6}  {moment}  {state:<8}{letter.type or '?':<18}{key_of(letter)}  {reason}")
    return 0


async def find(bus: "Bus", name: str) -> "DeadLetterEntry":
    """A dead letter by its number, or by its key <stream>/<consumer>/<sequence>. RunError when there is none."""
    from headrace.bus.runtime.dead_letters import entries, key_of

    existing = await entries(bus)
    for entry in reversed(existing):
        if name in (str(entry.seq), key_of(entry.letter)):
            return entry
    numbers = f"the newest are {', '.join(str(entry.seq) for entry in existing[-8:])}" if existing else "there are none"
    raise RunError(f"there is no dead letter {name!r}; {numbers}", 1)


async def _show(bus: "Bus", name: str) -> int:
    from headrace.bus.runtime.dead_letters import report_of

    say(json.dumps(msgspec.to_builtins(report_of(await find(bus, name))), indent=2))
    return 0


async def _retry_or_drop(bus: "Bus", args: argparse.Namespace) -> int:
    """Retry or drop entries. RunError for an entry that was retried or dropped before."""
    from headrace.bus.runtime.dead_letters import record_decision, resend

    for name in args.letter:
        entry = await find(bus, name)
        if entry.settled is not None:
            raise RunError(f"dead letter {entry.seq} was {entry.settled.how} already; see `headrace dlq list --all`", 1)
        if args.subcommand == "drop":
            await record_decision(bus, entry, "dropped", note=args.note)
            say(f"dead letter {entry.seq} is dropped")
            continue
        sent = await resend(bus, entry)
        await record_decision(bus, entry, "retried", sent, args.note)
        say(f"dead letter {entry.seq} was published again as {entry.letter.stream} #{sent}")
        if await superseded(bus, entry):
            complain(f"dead letter {entry.seq}: its slot has a later attempt, so the ledger does not count this one")
    return 0


async def superseded(bus: "Bus", entry: "DeadLetterEntry") -> bool:
    """Whether a later attempt of the dead letter's slot was issued."""
    from headrace.ledger import lost_attempts
    from headrace.messages.ledger import SlotIssued
    from headrace.messages.subjects import LEDGER

    lost = lost_attempts.lost_attempt(entry.letter)
    if lost is None:
        return False
    async for received in bus.history("HR_LEDGER", LEDGER.at(run=lost.run, group=lost.group)):
        issued = received.message
        if isinstance(issued, SlotIssued) and issued.slot == lost.slot and issued.attempt > lost.attempt:
            return True
    return False
