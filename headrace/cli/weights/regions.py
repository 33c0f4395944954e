"""`headrace weights regions`: prints the version that every node of every region holds and every replica serves.

`headrace status` prints the summary, a line per region.
"""

import argparse
import time
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say, say_report
from headrace.weights.receiving.readiness import NodeCopy, Replica

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain
    from headrace.weights.receiving.readiness import ReadinessLedger

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


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "regions", "print the version of every node and replica, and since when", regions)
    add_common(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")


async def regions(chain: "Chain", args: argparse.Namespace) -> int:
    """Print a table, or with ``--json`` one line of JSON."""
    current = await look(chain.bus, chain.folder.id)
    if args.json:
        say_report(current)
    else:
        say(table(current))
    return 0


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
