"""`headrace status`: the state of a run, the versions of its nodes and replicas, its staleness bound."""

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from headrace.cli.arguments import add_elsewhere, add_run, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.operations import Heartbeat
    from headrace.weights.receiving.readiness import NodeCopy, ReadinessLedger, Replica


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="show a run's actors, last step, staleness bound; set it")
    add_run(parser)
    add_elsewhere(parser)
    parser.add_argument(
        "--regions", action="store_true", help="print the version of every node and replica, and since when"
    )
    parser.add_argument(
        "--staleness", type=integer(0), metavar="BOUND", help="set the largest age of a token, in versions; wait for it"
    )
    parser.set_defaults(handler=status)


async def status(args: argparse.Namespace) -> int:
    """Print the state, the last step, evaluations, regions, bounds and actors, one per line; set the bound first."""
    from headrace.dashboard.report import curve_of
    from headrace.launch.session import run_of
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalResult
    from headrace.messages.training import StepDone

    async with run_of(args.run, args.config) as run:
        if args.staleness is not None:
            await change(run.bus, run.id, args.staleness)
        if args.regions:
            say(table(await look(run.bus, run.id)))
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


class Regions(NamedTuple):
    """Which versions the nodes of a run hold and its replicas serve."""

    run: str
    newest: int
    """The committed version; -1 for none."""
    ledger: "ReadinessLedger"
    alive: set[str]
    """Ids of replicas with a recent heartbeat."""

    def nodes(self, region: str) -> "list[NodeCopy]":
        """The newest files of a region's nodes, by node."""
        copies = [copy for copy in self.ledger.copies.values() if copy.region == region]
        return sorted(copies, key=lambda copy: copy.node)

    def replicas(self, region: str) -> "list[Replica]":
        """The replicas of a region, dead ones too."""
        return [replica for replica in self.ledger.replicas() if replica.region == region]


async def look(bus: "Bus", run: str) -> Regions:
    """The present state of a run."""
    from headrace.messages.subjects import WEIGHT_HEAD
    from headrace.weights.receiving import readiness

    last = await bus.last("HR_WEIGHTS", WEIGHT_HEAD.at(run=run))
    alive = {key.partition(".")[2] for key in await (await bus.kv("HR_PRESENCE")).keys("rollout.>")}
    newest = last.message.version if last is not None else -1
    return Regions(run, newest, await readiness.read(bus, run), alive)


def summary(current: Regions) -> list[str]:
    """A line per region: how many nodes hold the newest version and how many replicas serve it."""
    newest, lines = current.newest, []
    for name in current.ledger.regions():
        nodes = current.nodes(name)
        held = sum(node.version >= newest for node in nodes)
        text = f"version {newest} in {name or UNKNOWN}: held by {held} of {len(nodes)} nodes"
        if living := [replica.version for replica in current.replicas(name) if replica.replica in current.alive]:
            served = sum(version >= newest for version in living)
            text += f", served by {served} of {len(living)} replicas, the oldest served is {min(living)}"
        lines.append(text)
    return lines


def table(current: Regions) -> str:
    """A row per node and per replica, for a terminal."""
    rows = [("region", "node", "replica", "version", "behind", "since", "took", "state")]
    for region in current.ledger.regions():
        named: list[tuple[NodeCopy | Replica, str, str]] = [
            (copy, "(holds)", f"{copy.stage_s:.2f} s") for copy in current.nodes(region)
        ]
        for replica in current.replicas(region):
            gone = "" if replica.replica in current.alive else " (gone)"
            named.append((replica, f"{replica.replica}{gone}", f"{replica.pause_ms:.1f} ms"))
        for holder, name, took in named:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
            versions = (str(holder.version), str(current.newest - holder.version))
            rows.append((region or UNKNOWN, holder.node, name, *versions, since, took, holder.state_hash[:16]))
    if len(rows) == 1:
        return f"run {current.run}: no node has staged a version"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"run {current.run}, newest version {current.newest}", *lines])


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
