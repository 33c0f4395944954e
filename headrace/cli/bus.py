"""Commands about the broker that holds a run's messages, and about the dead letters among them.

`headrace up` prepares its own broker. A broker that an operator starts needs `bus declare` once, before the first
actor, and again after an upgrade. `dlq` also reads the store of a finished run; `--retry` publishes a message again and
needs an active broker; `--drop` records that an operator closed the entry, and the dead letter stays in its stream,
because the audit counts it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_config, add_elsewhere, add_run, group, integer
from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.bus.runtime.dead_letters import DeadLetterEntry
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the commands."""
    _add_dlq(commands)
    subcommands = group(commands, "bus", "prepare, back up and restore the broker's streams")
    for declare in (_add_declare, _add_backup, _add_restore):
        declare(subcommands)


def _add_declare(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("declare", help="create or update all streams and buckets on a running broker")
    add_config(parser, text="configuration with [bus] url and credentials")
    parser.add_argument("--url", default="", help="address of the broker; default: [bus] url of the configuration")
    parser.add_argument("--credentials", default="", help="folder with admin.nk; default: [bus] credentials")
    parser.add_argument("--run", default="", help="only the account of this run; default: every account")
    parser.add_argument("--replicas", type=integer(1), default=1, help="copies of every stream: 3 in a cluster")
    parser.add_argument("--reserve", action="store_true", help="reserve the streams' full size on the broker's disk")
    parser.set_defaults(handler=declare)


def declare(args: argparse.Namespace) -> int:
    """Connect as admin and declare everything; 4 when the broker refuses or cannot be reached."""
    import uvloop

    from headrace.bus.broker import permissions
    from headrace.bus.broker.credentials import accounts, of_run
    from headrace.bus.connection import Bus
    from headrace.bus.errors import BusError
    from headrace.bus.nats import streams

    config = args.settings
    url, credentials = args.url or config.bus.url, args.credentials or config.bus.credentials
    if not url:
        raise BusError("expected a broker: --url nats://host:port, or [bus] url in --config")

    runs = [args.run] if args.run else accounts(Path(credentials)) if Path(credentials or ".none").is_dir() else []
    folders = [of_run(credentials, run) for run in runs] or [credentials]

    async def body() -> None:
        for keys in folders:
            async with await Bus.connect(url, role="admin", credentials=keys or None) as bus:
                await streams.declare(bus, reserve=args.reserve, replicas=args.replicas, sizes=config.bus.stream_bytes)

    uvloop.run(body())
    many = f" in each of {len(folders)} accounts" if len(folders) > 1 else ""
    say(f"{url} has all {len(permissions.NAMES)} streams and buckets{many}")
    return 0


def _add_backup(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("backup", help="copy all streams and buckets of a run's broker into a folder")
    parser.add_argument("folder", metavar="DIR", help="a new folder")
    parser.add_argument("--run", default="latest", help="run id, path or 'latest' (default)")
    add_elsewhere(parser)
    parser.add_argument(
        "--live", action="store_true", help="back up while actors run: the copies are from different moments"
    )
    parser.set_defaults(handler=backup)


async def backup(args: argparse.Namespace) -> int:
    """Copy, and print the number of messages and bytes."""
    from headrace.bus.backup import back_up
    from headrace.launch.session import run_of

    async with run_of(args.run, args.config, "admin") as run:
        made = await back_up(run.bus, run.id, Path(args.folder), live=args.live)
    size = sum(copy.bytes for copy in made.copies)
    say(f"run {made.run}: {made.messages} messages of {len(made.copies)} streams, {size} bytes, in {args.folder}/")
    return 0


def _add_restore(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("restore", help="restore a backup into a broker that has no streams")
    parser.add_argument("folder", metavar="DIR", help="made by headrace bus backup")
    parser.add_argument("--config", required=True, metavar="TOML", help="with [run] id, [bus] url and credentials")
    parser.set_defaults(handler=restore)


async def restore(args: argparse.Namespace) -> int:
    """Restore, and print the number of messages."""
    from headrace.bus.backup import restore as restored
    from headrace.launch.session import run_of

    async with run_of("", args.config, "admin") as run:
        backup = await restored(run.bus, Path(args.folder))
    say(f"run {backup.run}: {backup.messages} messages of {len(backup.copies)} streams are restored")
    return 0


LETTER_HELP = "number, or STREAM/CONSUMER/SEQUENCE"


def _add_dlq(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("dlq", help="messages that no actor could handle: list, show, settle")
    add_run(parser)
    parser.add_argument("--all", action="store_true", help="list settled entries and other runs' entries too")
    letters = parser.add_mutually_exclusive_group()
    for name, text in (
        ("show", f"print everything about each LETTER ({LETTER_HELP}) as JSON"),
        ("retry", "publish the messages again, to an active run"),
        ("drop", "close the entries"),
    ):
        letters.add_argument(f"--{name}", nargs="+", metavar="LETTER", default=(), help=text)
    parser.add_argument("--note", default="", help="with --retry or --drop: reason, stored with the entry")
    parser.set_defaults(handler=dlq)


async def dlq(args: argparse.Namespace) -> int:
    """List the letters, print those that are named as JSON, or settle them."""
    from headrace.launch.session import bus_of

    folder = runs.find(args.run)
    if args.retry:
        _require_broker(folder)
    async with bus_of(folder) as bus:
        if args.retry or args.drop:
            return await _retry_or_drop(bus, args)
        for name in args.show:
            await _show(bus, name)
        return 0 if args.show else await _list(bus, folder.id, everything=args.all)


def _require_broker(folder: RunDir) -> None:
    """RunError if the run has no active broker."""
    from headrace.bus.broker.server import running
    from headrace.config import Config, load

    config = load(folder.config) if folder.config.is_file() else Config()
    if not config.bus.url and running(folder.broker) is None:
        raise RunError(
            f"run {folder.id} is over, so no actor would receive the message: `dlq --retry` needs an active run", 4
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


async def _show(bus: "Bus", name: str) -> None:
    from headrace.bus.runtime.dead_letters import report_of

    say(json.dumps(msgspec.to_builtins(report_of(await find(bus, name))), indent=2))


async def _retry_or_drop(bus: "Bus", args: argparse.Namespace) -> int:
    """Retry or drop entries. RunError for an entry that was retried or dropped before."""
    from headrace.bus.runtime.dead_letters import record_decision, resend

    for name in args.retry or args.drop:
        entry = await find(bus, name)
        if entry.settled is not None:
            raise RunError(f"dead letter {entry.seq} was {entry.settled.how} already; see `headrace dlq --all`", 1)
        if args.drop:
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
