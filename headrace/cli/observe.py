"""Commands that show a run: its page, its actors, its logs, its state, and the audit of its streams."""

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_elsewhere, add_plugins, add_run, add_set, integer
from headrace.launch.output import say, say_report
from headrace.launch.runs import RunError
from headrace.weights.receiving.readiness import NodeCopy, Replica

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.dashboard.live.server import Address
    from headrace.launch.supervision.signals import Stopping
    from headrace.messages.operations import Heartbeat
    from headrace.weights.receiving.readiness import ReadinessLedger


def add(commands: "Commands") -> None:
    """Declare the commands."""
    for declare in (_add_dashboard, _add_top, _add_logs, _add_status, _add_audit):
        declare(commands)


def _add_dashboard(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("dashboard", help="serve the live page of a run")
    add_run(parser)
    add_elsewhere(parser)
    add_set(parser)
    parser.add_argument("--host", default="", help="address at which the page listens; default: [dashboard] host")
    parser.add_argument("--port", type=integer(0), default=None, help="HTTP port; default: [dashboard] port")
    parser.add_argument(
        "--users",
        type=integer(1),
        metavar="MINUTES",
        help="also print an address with users' sessions, valid for MINUTES",
    )
    add_plugins(parser)
    parser.set_defaults(handler=dashboard)


def dashboard(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import uvloop

    from headrace.launch.supervision.signals import interruptible

    async def body(stopping: "Stopping", closing: "AsyncExitStack") -> int:
        stopping.effect = "the page is closed"
        return await (_elsewhere if args.config else _here)(args, closing)

    return uvloop.run(interruptible(body))


async def _here(args: argparse.Namespace, closing: "AsyncExitStack") -> int:
    """The page of a run with a folder on this machine."""
    from headrace.bus.broker.credentials import of_run
    from headrace.bus.broker.server import Server, running
    from headrace.config import Config, load
    from headrace.dashboard.live.server import Address
    from headrace.launch import runs
    from headrace.launch.output import say
    from headrace.launch.page import opened, read_place, websocket_of
    from headrace.launch.runs import RunError

    folder = runs.find(args.run)
    config = load(folder.config, args.set) if folder.config.is_file() else Config()
    url, credentials, websocket = config.bus.url, of_run(config.bus.credentials, folder.id), ""
    if not url and running(folder.broker) is not None:
        live = read_place(folder.path)
        if live is None:
            raise RunError(f"{folder.id} runs with [dashboard] enabled = false; start it again with enabled = true")
        say(f"{folder.id}: {opened(live.page, live.key)}")
        if args.users:
            say(f"with users' sessions for {args.users} minutes: {live.users(args.users)}")
        return 0
    address = Address(args.host or config.dashboard.host, config.dashboard.port if args.port is None else args.port)
    if not url:
        server = Server(folder.broker, need_free=0, origins=address.origins)
        await closing.enter_async_context(await server.start())
        url, credentials, websocket = server.url, str(folder.broker / "credentials"), server.websocket
    return await _serve(args, closing, config, folder.id, address, url, credentials, websocket_of(config, websocket))


async def _elsewhere(args: argparse.Namespace, closing: "AsyncExitStack") -> int:
    """The page of a launched or deployed run, whose broker admits only the ports of `launch.site`."""
    from pathlib import Path

    from headrace.bus.broker.credentials import of_run
    from headrace.config import ConfigError
    from headrace.dashboard.live.server import Address
    from headrace.launch.admission import own
    from headrace.launch.site import site_of

    config = own(args.config, args.set)
    for key, value in (("run.id", config.run.id), ("bus.url", config.bus.url)):
        if not value:
            raise ConfigError(f"{args.config}: {key}: the page finds the run and its broker by it; set {key}")
    site = site_of(config)
    if site is None:
        raise ConfigError(f"{args.config}: dashboard.enabled is false, so the broker admits no page; set it to true")
    credentials = of_run(config.bus.credentials, config.run.id)
    port = site.port if args.port is None else args.port
    address = Address(args.host or site.host, port, site.context(Path(credentials), args.host))
    return await _serve(args, closing, config, config.run.id, address, config.bus.url, credentials, site.websocket)


async def _serve(
    args: argparse.Namespace,
    closing: "AsyncExitStack",
    config: "Config",
    run: str,
    address: "Address",
    url: str,
    credentials: str,
    websocket: str,
) -> int:
    """Serve the page until the command is interrupted."""
    import asyncio
    import sys
    from pathlib import Path

    from headrace.bus.connection import Bus
    from headrace.launch.output import say
    from headrace.launch.page import opened, serving, write_place
    from headrace.launch.runs import RunError
    from headrace.launch.supervision.notify import ready

    bus = await closing.enter_async_context(await Bus.connect(url, role="dashboard", credentials=credentials or None))
    page = await closing.enter_async_context(serving(config, run, bus, address, websocket, credentials))
    folder = Path(config.run.dir) / run
    token = page.access.token(60 * args.users) if args.users else ""
    try:
        write_place(folder, address.url, page.access, token)
    except OSError as error:
        raise RunError(f"the page's key cannot be written to {folder}/page.json: {error.strerror}", 3) from None
    closing.callback((folder / "page.json").unlink, missing_ok=True)
    if not sys.stdout.isatty():  # the journal of a service
        say(f"{run}: {address.url}, its key is in {folder}/page.json")
    else:
        say(f"{run}: {opened(address.url, page.access.key)}")
        if token:
            say(f"with users' sessions for {args.users} minutes: {opened(address.url, token)}")
    async with ready():
        await asyncio.Event().wait()
    return 0


def _add_top(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("top", help="show the actors of a run live: sort, filter, figures, logs, drain")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=top)


def top(args: argparse.Namespace) -> int:
    """Show the screen until the user quits."""
    import asyncio
    import time

    from headrace.config import Config, load
    from headrace.dashboard.watch import Watch
    from headrace.launch import logs, runs
    from headrace.launch.session import run_of

    try:
        from headrace.dashboard.terminal import run_top
    except ImportError as error:
        raise runs.RunError(f"{error.name} is not installed: pip install 'headrace[terminal]'", 3) from None
    folder = None if args.config else runs.find(args.run)
    source = args.config or (folder.config if folder is not None and folder.config.is_file() else None)
    config = load(source) if source else Config()

    def lines_of(id: str) -> list[str]:
        if folder is None or not folder.logs.is_dir():
            return ["the logs are on the actor's host"]
        return [logs.shown(line) for line in logs.read(folder.logs, logs.Wanted(actor=id), {})]

    async def body() -> int:
        async with run_of(args.run, args.config) as run:
            if not run.served:
                raise runs.RunError(f"run {run.id} is over: `headrace dashboard {run.id}` shows it")
            await run_top(Watch(run.bus, run.id, config, time.time()), run.bus, run.id, lines_of)
        return 0

    return asyncio.run(body())  # not on uvloop: its signal handling conflicts with Textual's


def _add_logs(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("logs", help="show the logs of a run, of one actor or of one trace")
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until interrupted")
    parser.add_argument("--actor", default="", metavar="NAME", help="only this actor, process or actor id")
    parser.add_argument("--trace", default="", metavar="ID", help="only lines of this trace (its first digits suffice)")
    parser.add_argument(
        "--level", default="", choices=("debug", "info", "warning", "error"), help="only lines of this level and above"
    )
    parser.set_defaults(handler=logs)


def logs(args: argparse.Namespace) -> int:
    """Print the lines that pass the filters."""
    from headrace.launch import logs as reading
    from headrace.launch import runs
    from headrace.launch.output import say

    folder = runs.find(args.run)
    if not folder.logs.is_dir():
        raise runs.RunError(f"{folder.path} has no logs: its actors were started elsewhere, see their own output")
    wanted = reading.Wanted(args.actor, args.trace, args.level)
    reading.follow(folder.logs, wanted, say, ends=lambda: not args.follow)
    return 0


def _add_status(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "status", help="show a run's live actors, last step and staleness bound; set the bound"
    )
    add_run(parser)
    add_elsewhere(parser)
    parser.add_argument(
        "--regions", action="store_true", help="print the version of every node and replica, and since when"
    )
    parser.add_argument("--json", action="store_true", help="with --regions: one line of JSON instead of a table")
    parser.add_argument(
        "--staleness", type=integer(0), metavar="BOUND", help="set the largest age of a token, in versions; wait for it"
    )
    parser.set_defaults(handler=status)


async def status(args: argparse.Namespace) -> int:
    """Print the state, the last step, evaluations, regions, bounds and actors, one per line; set the bound first."""
    from headrace.dashboard.report import curve_of
    from headrace.launch.output import say
    from headrace.launch.session import run_of
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalResult
    from headrace.messages.training import StepDone

    async with run_of(args.run, args.config) as run:
        if args.staleness is not None:
            await change(run.bus, run.id, args.staleness)
        if args.regions:
            current = await look(run.bus, run.id)
            if args.json:
                say_report(current)
            else:
                say(table(current))
            return 0
        beats = await _heartbeats(run.bus, run.id) if run.served else []
        last = await run.bus.last("HR_STEP", subjects.STEP.at(run=run.id))
        state = "active" if beats else "no actor is alive" if run.served else "over"
        say(f"run {run.id}: {state}")
        if last is not None and isinstance(last.message, StepDone):
            done = last.message
            say(f"step {done.step + 1}, version {done.version}, pass rate {done.pass_rate:.2f}, k1 {done.k1:+.4f}")
            if (acts := done.behaviour) is not None:
                say(
                    f"attempts: {acts.calls_per_turn:.2f} calls a turn, {acts.reads_before_edit:.1f} reads before "
                    f"an edit, {acts.tested:.0%} tested, {acts.lint_fixed:.2f} lint errors fixed, {acts.asked:.0%} "
                    "asked the user"
                )
        events = run.bus.history("HR_EVENT", subjects.EVENT.where(run=run.id, type=EvalResult.type_name))
        for point in curve_of([entry.message async for entry in events if isinstance(entry.message, EvalResult)]):
            say(f"version {point.version} passes {point.rate:.2f} of {point.tasks} tasks of {point.suite}")
        for line in (*summary(await look(run.bus, run.id)), *await bounds_of(run.bus, run.id)):
            say(line)
        for beat in beats:
            say(f"  {beat.actor:<16}{beat.id:<24}{beat.state:<10}busy {beat.busy:4.0%}  {beat.status}")
    return 0


async def _heartbeats(bus: "Bus", run: str) -> "list[Heartbeat]":
    """The newest heartbeat of every actor that serves the run."""
    from headrace.messages.operations import Heartbeat

    presence = await bus.kv("HR_PRESENCE")
    messages = [entry[0] for _, entry in sorted((await presence.items()).items())]
    return [beat for beat in messages if isinstance(beat, Heartbeat) and beat.run in ("", run)]


UNKNOWN = "(unknown)"


class ReplicaReport(Replica, frozen=True, kw_only=True):
    """A replica, and whether it is alive."""

    alive: bool
    behind: int
    """Versions between the newest one and the one that it serves."""


class RegionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one region; -1 if there is none."""

    staged: int
    """The oldest among the nodes' newest files."""
    serving_oldest: int
    nodes: list[NodeCopy]
    replicas: list[ReplicaReport]


class RegionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The line of ``--json``."""

    run: str
    newest: int
    """The committed version; -1 for none."""
    regions: dict[str, RegionReport]


async def look(bus: "Bus", run: str) -> RegionsReport:
    """The present report of a run."""
    from headrace.messages.subjects import WEIGHT_HEAD
    from headrace.weights.receiving import readiness

    last = await bus.last("HR_WEIGHTS", WEIGHT_HEAD.at(run=run))
    ledger = await readiness.read(bus, run)
    alive = {key.partition(".")[2] for key in await (await bus.kv("HR_PRESENCE")).keys("rollout.>")}
    return report(run, last.message.version if last is not None else -1, ledger, alive)


def summary(current: RegionsReport) -> list[str]:
    """A line per region: how many nodes hold the newest version and how many replicas serve it."""
    newest, lines = current.newest, []
    for name, region in current.regions.items():
        held = sum(node.version >= newest for node in region.nodes)
        text = f"version {newest} in {name}: held by {held} of {len(region.nodes)} nodes"
        if living := [state for state in region.replicas if state.alive]:
            served = sum(state.version >= newest for state in living)
            text += f", served by {served} of {len(living)} replicas, the oldest served is {region.serving_oldest}"
        lines.append(text)
    return lines


def report(run: str, newest: int, ledger: "ReadinessLedger", alive: set[str]) -> RegionsReport:
    """The ledger by region. newest: the committed version, -1 for none. alive: ids of replicas with a recent
    heartbeat."""
    by_region: dict[str, RegionReport] = {}
    for region in ledger.regions():
        copies = [copy for copy in ledger.copies.values() if copy.region == region]
        replicas = [
            ReplicaReport(
                **msgspec.structs.asdict(replica),
                alive=replica.replica in alive,
                behind=newest - replica.version,
            )
            for replica in ledger.replicas()
            if replica.region == region
        ]
        by_region[region or UNKNOWN] = RegionReport(
            staged=min((copy.version for copy in copies), default=-1),
            serving_oldest=min((replica.version for replica in replicas if replica.alive), default=-1),
            nodes=sorted(copies, key=lambda copy: copy.node),
            replicas=replicas,
        )
    return RegionsReport(run=run, newest=newest, regions=by_region)


def table(current: RegionsReport) -> str:
    """The report as a table for a terminal."""
    if not current.regions:
        return f"run {current.run}: no node has staged a version"
    rows = [("region", "node", "replica", "version", "behind", "since", "took", "state")]
    for region, of_region in current.regions.items():
        for copy in of_region.nodes:
            rows.append(
                (
                    *(region, copy.node, "(holds)", str(copy.version), str(current.newest - copy.version)),
                    *(_when(copy.since), f"{copy.stage_s:.2f} s", copy.state_hash[:16]),
                )
            )
        for replica in of_region.replicas:
            name = replica.replica if replica.alive else f"{replica.replica} (gone)"
            rows.append(
                (
                    *(region, replica.node, name, str(replica.version), str(replica.behind)),
                    *(_when(replica.since), f"{replica.pause_ms:.1f} ms", replica.state_hash[:16]),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"run {current.run}, newest version {current.newest}", *lines])


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


ANSWER_S = 15.0


async def bounds_of(bus: "Bus", run: str) -> list[str]:
    """The staleness bounds that a run has had, a line each."""
    from headrace.messages.ledger import StalenessBound
    from headrace.messages.subjects import CLOSE

    closings = [received.message async for received in bus.history("HR_SCORE", CLOSE.where(run=run))]
    bounds = [record for record in closings if isinstance(record, StalenessBound)]
    return [f"staleness bound {record.bound} from batch {record.first_batch} on" for record in bounds]


async def change(bus: "Bus", run: str, bound: int) -> None:
    """Request another bound and wait until it is in force. RunError when it is refused or not answered."""
    from headrace.algorithms.staleness import Bounds
    from headrace.messages.ledger import BoundAsked, StalenessBound
    from headrace.messages.subjects import CLOSE, EVENT

    where = EVENT.at(run=run, actor="operator", type=BoundAsked.type_name)
    asked = await bus.publish(where, BoundAsked(run=run, bound=bound))
    bounds: Bounds | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            async for received in bus.follow("HR_SCORE", CLOSE.where(run=run)):
                record = received.message
                if not isinstance(record, StalenessBound):
                    continue
                bounds = bounds.changed(record.first_batch, record.bound) if bounds else Bounds.constant(record.bound)
                if record.asked_seq >= asked:
                    break
    except TimeoutError:
        raise RunError(
            f"the curriculum of run {run} did not answer within {ANSWER_S:.0f} s. The request stays in the stream and "
            f"a curriculum that starts later handles it; `headrace status {run}` shows the bound in force",
            1,
        ) from None
    assert bounds is not None
    first = bounds.changes[-1][0]
    full = next(batch for batch in range(first, first + bound + 1) if bounds.at(batch) == bound)
    say(f"staleness bound {bound} from batch {full} on{f', growing from batch {first}' if full > first else ''}")


def _add_audit(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("audit", help="verify that nothing was lost, trained twice or too stale")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=audit)


async def audit(args: argparse.Namespace) -> int:
    """Print the report as one JSON line, and every fault in a sentence on standard error; 1 when the ledger does not
    balance."""
    from headrace.launch.output import complain, say_report
    from headrace.launch.session import run_of
    from headrace.replay.audit import prove

    async with run_of(args.run, args.config) as run:
        report, faults = await prove(run.bus, run.id)
    say_report(report)
    for fault in faults:
        complain(fault)
    return 0 if report.balanced else 1
