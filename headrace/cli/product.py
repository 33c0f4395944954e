"""Commands about users: the version that they get, their data, their API keys, their repositories and their editors."""

import argparse
import asyncio
import importlib.util
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headrace.cli.arguments import add_elsewhere, add_key, add_run, integer, key_of
from headrace.launch.output import say, say_report
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.launch.session import OpenRun
    from headrace.messages.base import Message
    from headrace.messages.product import Promotion

LINE = 32 << 20
"""Bytes of an editor's message."""


def add(commands: "Commands") -> None:
    """Declare the commands."""
    for declare in (_add_gate, _add_purge, _add_keys, _add_lines, _add_acp):
        declare(commands)


def _add_gate(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gate", help="show the candidate's stage; promote, roll back")
    add_run(parser)
    add_elsewhere(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--promote", type=integer(0), metavar="VERSION", help="serve this version to users at once, without the gate"
    )
    either.add_argument(
        "--rollback", action="store_true", help="serve the version that was promoted before the present one"
    )
    parser.add_argument("--branch", action="store_true", help="VERSION belongs to the run's branch, not to the run")
    parser.add_argument("--reason", default="by an operator", help="reason for the promotion, stored in its record")
    parser.set_defaults(handler=gate)


async def gate(args: argparse.Namespace) -> int:
    """Print one JSON line per verdict, and a last line with the present state."""
    from headrace.launch.session import run_of
    from headrace.ledger.gate import GateLine
    from headrace.messages.product import GateState, GateVerdict, gate_key
    from headrace.messages.subjects import EVENT

    if args.promote is not None:
        return await promote(args)
    if args.rollback:
        return await rollback(args)

    async with run_of(args.run, args.config) as run:
        where = EVENT.where(run=run.id, actor="feedback", type=GateVerdict.type_name)
        async for received in run.bus.history("HR_EVENT", where):
            say_report(GateLine(verdict=received.message))
        entry = await (await run.bus.kv("HR_PRODUCT")).get(gate_key(run.id))
        state = entry[0] if entry is not None and isinstance(entry[0], GateState) else GateState(run=run.id)
        say_report(GateLine(now=state))
    return 0


async def promote(args: argparse.Namespace) -> int:
    """Request the promotion from the run's feedback actor, and wait for its answer."""
    from headrace.config import branch_name
    from headrace.launch.session import run_of
    from headrace.messages.product import Promotion

    async with run_of(args.run, args.config) as run:
        branch = branch_name(run.id, run.config.feedback) if args.branch else ""
        await ask(run.bus, Promotion(run=run.id, version=args.promote, branch=branch, reason=args.reason))
    say(f"version {args.promote}{f' of {branch}' if branch else ''} serves new sessions of run {run.id}")
    return 0


async def rollback(args: argparse.Namespace) -> int:
    """Request the previous version from the run's feedback actor, and wait for its answer."""
    import msgspec

    from headrace.launch.session import run_of

    async with run_of(args.run, args.config) as run:
        records = await promoted(run.bus, run.id)
        earlier = [record for record in records if record.policy != records[-1].policy]
        if not earlier:
            raise RunError(f"run {run.id} has no version that was promoted before the present one")
        target = earlier[-1]
        await ask(run.bus, msgspec.structs.replace(target, reason="rollback by an operator"))
    name = f"version {target.version}{f' of {target.branch}' if target.branch else ''}"
    say(f"{name} serves new sessions of run {run.id} again")
    return 0


PROMOTION_S = 30.0


async def promoted(bus: "Bus", run: str) -> list["Promotion"]:
    """The records of all promotions, in order."""
    from headrace.messages.product import Promotion
    from headrace.messages.subjects import EVENT

    where = EVENT.where(run=run, actor="feedback", type=Promotion.type_name)
    return [
        received.message async for received in bus.history("HR_EVENT", where) if isinstance(received.message, Promotion)
    ]


async def ask(bus: "Bus", promotion: "Promotion") -> None:
    """Request a promotion and wait until it is in force. RunError if it is refused or not answered."""
    from headrace.messages.operations import Event
    from headrace.messages.subjects import EVENT

    run = promotion.run
    after = await bus.last_seq("HR_EVENT")
    await bus.publish(EVENT.at(run=run, actor="operator", type=promotion.type_name), promotion)
    where = EVENT.where(run=run, actor="feedback", type=Event.type_name)
    try:
        async with asyncio.timeout(PROMOTION_S):
            async for received in bus.follow("HR_EVENT", where, start=after + 1):
                event = received.message
                if isinstance(event, Event) and event.kind == "promotion_refused":
                    raise RunError(f"run {run} refused the promotion: {event.text}", 1)
                if isinstance(event, Event) and event.kind == "promoted":
                    return
    except TimeoutError:
        raise RunError(
            f"the feedback actor of run {run} did not answer within {PROMOTION_S:.0f} s. The request stays in the "
            "stream, and a feedback actor that starts later handles it",
            1,
        ) from None


PURGE_S = 60.0


def _add_purge(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("purge", help="delete a user's data everywhere; write a certificate")
    add_run(parser, optional=False)
    add_elsewhere(parser)
    parser.add_argument("user", help="the user's name, as the client sends it; or the hash, with --hash")
    parser.add_argument("--tenant", default="", help="the user's tenant; without it that of [production]")
    parser.add_argument("--hash", action="store_true", help="USER is the hash that names the user on the bus")
    parser.add_argument("--output", default="", help="file for the certificate (default: purge-<hash>.json)")
    parser.add_argument("--readmit", action="store_true", help="delete nothing: take the user off the deny-list again")
    parser.set_defaults(handler=purge)


async def purge(args: argparse.Namespace) -> int:
    """Request the purge from the run's feedback actor, and write its certificate."""
    if args.readmit:
        return await readmit(args)
    import msgspec

    from headrace.launch.session import run_of
    from headrace.messages.product import PurgeCertificate, PurgeUser

    async with run_of(args.run, args.config) as run:
        user = await _hash(run, args)
        answer = await _ask(run, PurgeUser(user=user))
    if not isinstance(answer, PurgeCertificate):
        raise RunError(f"the user was not purged: {_detail(answer)}", 1)
    path = Path(args.output or f"purge-{user}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    say(f"{answer.detail}; the certificate is in {path}")
    return 0


async def readmit(args: argparse.Namespace) -> int:
    """Request from the run's feedback actor that a user is trained on again."""
    from headrace.launch.session import run_of
    from headrace.messages.operations import Ack
    from headrace.messages.product import ReadmitUser

    async with run_of(args.run, args.config) as run:
        answer = await _ask(run, ReadmitUser(user=await _hash(run, args)))
    if not isinstance(answer, Ack) or not answer.ok:
        raise RunError(f"the user was not readmitted: {_detail(answer)}", 1)
    say(answer.detail)
    return 0


async def _hash(run: "OpenRun", args: argparse.Namespace) -> str:
    """The hash that names the user on the bus. KeysRefused where the operator's seed cannot open the gateways' key."""
    from headrace.gateway.tenants.store import secret
    from headrace.gateway.user_keys import UserKeys
    from headrace.messages.product import USERS_SECRET

    if args.hash:
        return str(args.user)
    users = UserKeys(await secret(run.bus, USERS_SECRET))
    return users.hash(args.tenant or run.config.production.tenant, args.user)


async def _ask(run: "OpenRun", message: "Message") -> "Message":
    """The answer of the run's feedback actor. RunError where it gives none."""
    from headrace.bus.errors import BusError
    from headrace.messages.subjects import RPC

    subject = RPC.at(service="feedback", caller=run.bus.role, method="purge")
    try:
        return await run.bus.request(subject, message, timeout=PURGE_S)
    except BusError as error:
        raise RunError(f"the feedback actor of run {run.id} did not answer: {error}", 1) from None


def _detail(answer: "Message") -> str:
    from headrace.messages.operations import Ack

    return answer.detail if isinstance(answer, Ack) else f"unexpected answer {answer.type_name}"


def _add_keys(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("keys", help="API keys of the gateways: list, make, end")
    add_run(parser)
    add_elsewhere(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--add", metavar="TENANT", help="make a key and print it; only its hash is stored")
    either.add_argument("--revoke", metavar="ID", help="end a key; running gateways refuse it from then on")
    parser.add_argument(
        "--training",
        action="store_true",
        help="--add: the tenant opts in, rated sessions of this key may be trained on",
    )
    parser.add_argument("--rate", type=integer(1), metavar="N", help="--add: requests a minute (default 600)")
    parser.add_argument(
        "--tokens", type=integer(0), metavar="N", help="--add: tokens a minute of prompts and turns (default: no limit)"
    )
    parser.add_argument(
        "--scope",
        action="append",
        choices=("turns", "agents", "feedback", "purge"),
        help="--add: what the key opens; repeat it for several (default: turns, agents, feedback)",
    )
    parser.set_defaults(handler=keys)


async def keys(args: argparse.Namespace) -> int:
    """Make or end a key; otherwise print a line per key: id, tenant, limits, opt-in to training, scopes."""
    import sys

    from headrace.gateway.tenants import store
    from headrace.gateway.tenants.keys import digest_of
    from headrace.launch.session import run_of
    from headrace.messages.product import USUAL

    if args.add is None and (args.training or args.scope or args.rate is not None or args.tokens is not None):
        raise RunError("--training, --rate, --tokens and --scope describe a new key: expected --add TENANT too", 2)
    async with run_of(args.run, args.config) as run:
        if args.revoke is not None:
            await store.revoke(run.bus, args.revoke)
            say(f"key {args.revoke} is revoked")
        elif args.add is not None:
            key = await store.add(
                run.bus,
                args.add,
                training=args.training,
                requests_per_minute=args.rate or 600,
                tokens_per_minute=args.tokens or 0,
                scopes=args.scope or USUAL,
            )
            try:
                sys.stdout.write(key + "\n")
                sys.stdout.flush()
            except OSError:  # nobody has read it
                await store.revoke(run.bus, digest_of(key)[:8])
                raise
        else:
            await store.make_secrets(run.bus)
            for entry in await store.entries(run.bus):
                opted = "training allowed" if entry.training else "never trained on"
                rates = f"{entry.requests_per_minute:>6}/min  {entry.tokens_per_minute or 'any':>8} tokens/min"
                say(f"{entry.id}  {entry.tenant:<20}{rates}  {opted:<18}{' '.join(entry.scopes)}")
    return 0


def _add_lines(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("lines", help="report the lines of agents that this repository still has")
    parser.add_argument(
        "--watch",
        nargs=2,
        metavar=("AGENT", "RUN"),
        help="report nothing: follow the lines of this agent's run, whose changes are in the work tree now",
    )
    parser.add_argument("--url", help="--watch: address of the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("--hook", action="store_true", help="--watch: also report after every merge, by a hook")
    parser.add_argument("--merged", action="store_true", help="a merge just ended: report all watched runs as merged")
    add_key(parser)
    parser.set_defaults(handler=lines)


def lines(args: argparse.Namespace) -> int:
    """Print one JSON line per report that is due; 1 when one failed. With --watch, note the run."""
    if args.watch is None:
        return report(args)
    if not args.url:
        raise RunError("expected --url, the address of the gateway that --watch reports to", 2)
    return watch(args)


def watch(args: argparse.Namespace) -> int:
    """Note the run, and make the hook."""
    import time

    from headrace.editor.reporting import Noted, Repository

    repository = Repository(Path.cwd())
    if args.hook:
        repository.install_hook()
    url = args.url.rstrip("/")
    repository.note(Noted(url=url, agent=args.watch[0], run=args.watch[1], since=time.time()))
    say("`headrace lines` reports what is due after 10 minutes and after 24 hours: call it from cron")
    return 0


def report(args: argparse.Namespace) -> int:
    """Report to every gateway of a watched run. Exit code 1 when a report failed."""
    from headrace.editor.api import AgentsApi
    from headrace.editor.reporting import Repository

    async def body(repository: Repository) -> bool:
        failed = False
        for url in sorted({noted.url for noted in repository.noted()}):
            async with AgentsApi(url, key_of(args)) as api:
                for answer in await repository.report(api, url, merged=args.merged):
                    failed |= "error" in answer
                    print(json.dumps(answer))
        return failed

    return int(asyncio.run(body(Repository(Path.cwd()))))


def _add_acp(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("acp", help="serve a gateway's agents to an editor (stdio)")
    parser.add_argument("--url", required=True, help="address of the gateway, such as http://127.0.0.1:8080")
    add_key(parser)
    parser.set_defaults(handler=serve)


def serve(args: argparse.Namespace) -> int:
    """Serve until the editor closes the streams."""
    from headrace.config import ConfigError

    if importlib.util.find_spec("acp") is None:
        raise ConfigError("headrace acp needs the package agent-client-protocol: pip install 'headrace[acp]'")
    key = key_of(args)
    if not (_is_pipe(0) and _is_pipe(1)):
        raise ConfigError("headrace acp needs pipes as standard input and output: an editor starts it so")
    asyncio.run(_serve(args.url, key))
    return 0


def _is_pipe(fd: int) -> bool:
    """Whether an open file is a pipe, a socket or a terminal."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


async def _serve(url: str, key: str) -> None:
    import acp

    from headrace.editor.adapter import Adapter, pass_messages
    from headrace.editor.api import AgentsApi

    given, answers = await acp.stdio_streams(limit=LINE)
    read = asyncio.StreamReader(LINE)
    async with AgentsApi(url, key) as api:
        passing = asyncio.create_task(pass_messages(given, answers, read))
        await acp.run_agent(cast(acp.Agent, Adapter(api)), answers, read, use_unstable_protocol=True)
        passing.cancel()
