"""`headrace weights regions`: the version that every node of every region holds and every replica serves.

`headrace status` prints the summary, a line per region.
"""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain
    from headrace.weights.receiving.readiness import ReadinessLedger

UNKNOWN = "(unknown)"


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "regions", "print which replica runs which version since when", regions)
    add_common(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")


async def regions(chain: "Chain", args: argparse.Namespace) -> int:
    """A table, or with ``--json`` one line of JSON."""
    current = await look(chain.bus, chain.folder.id)
    say(json.dumps(current) if args.json else table(current))
    return 0


async def look(bus: "Bus", run: str) -> dict[str, Any]:
    """The ledger of a run as of now; see `figures`."""
    from headrace.messages.subjects import WEIGHT_HEAD
    from headrace.weights.receiving import readiness

    last = await bus.last("HR_WEIGHTS", WEIGHT_HEAD.at(run=run))
    ledger = await readiness.read(bus, run)
    alive = {key.partition(".")[2] for key in await (await bus.kv("HR_PRESENCE")).keys("rollout.>")}
    return figures(run, last.message.version if last is not None else -1, ledger, alive)


def summary(found: dict[str, Any]) -> list[str]:
    """A line per region: how many have the newest version."""
    newest, lines = found["newest"], []
    for region, one in found["regions"].items():
        nodes, living = one["nodes"], [replica for replica in one["replicas"] if replica["alive"]]
        held = sum(node["version"] >= newest for node in nodes)
        text = f"version {newest} in {region}: held by {held} of {len(nodes)} nodes"
        if living:
            served = sum(replica["version"] >= newest for replica in living)
            text += f", served by {served} of {len(living)} replicas, the oldest served is {one['serving_oldest']}"
        lines.append(text)
    return lines


def figures(run: str, newest: int, ledger: "ReadinessLedger", alive: set[str]) -> dict[str, Any]:
    """The ledger as plain data. newest: the committed version, -1 for none. alive: ids of replicas that beat."""
    out: dict[str, Any] = {"run": run, "newest": newest, "regions": {}}
    for region in ledger.regions():
        copies = [copy for copy in ledger.copies.values() if copy.region == region]
        replicas = [replica for replica in ledger.replicas() if replica.region == region]
        living = [replica for replica in replicas if replica.replica in alive]
        out["regions"][region or UNKNOWN] = {
            "staged": min((copy.version for copy in copies), default=-1),
            "serving_oldest": min((replica.version for replica in living), default=-1),
            "nodes": [msgspec.to_builtins(copy) for copy in sorted(copies, key=lambda copy: copy.node)],
            "replicas": [
                msgspec.to_builtins(replica) | {"alive": replica.replica in alive, "behind": newest - replica.version}
                for replica in replicas
            ],
        }
    return out


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    if not found["regions"]:
        return f"run {found['run']}: no node has staged a version"
    rows = [("region", "node", "replica", "version", "behind", "since", "took", "state")]
    for region, one in found["regions"].items():
        for copy in one["nodes"]:
            rows.append(
                (
                    *(region, copy["node"], "(holds)", str(copy["version"]), str(found["newest"] - copy["version"])),
                    *(_when(copy["since"]), f"{copy['stage_s']:.2f} s", copy["state_hash"][:16]),
                )
            )
        for replica in one["replicas"]:
            name = replica["replica"] if replica["alive"] else f"{replica['replica']} (gone)"
            rows.append(
                (
                    *(region, replica["node"], name, str(replica["version"]), str(replica["behind"])),
                    *(_when(replica["since"]), f"{replica['pause_ms']:.1f} ms", replica["state_hash"][:16]),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"run {found['run']}, newest version {found['newest']}", *lines])


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
