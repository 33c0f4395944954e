"""`headrace weights collect`: removes published versions that no receiver needs any more.

It reads with the role operator and purges with the role trainer, the only role with that permission.
"""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "collect", "remove versions that no receiver needs any more", collect)
    add_common(parser)
    parser.add_argument("--chains", type=int, default=3, help="number of newest chains to keep, at least 2; default: 3")


async def collect(chain: "Chain", args: argparse.Namespace) -> int:
    """Purge and print the removed versions."""
    from headrace.bus.connection import Bus
    from headrace.bus.payloads import retention
    from headrace.weights import chain as chains
    from headrace.weights.full import retention as full
    from headrace.weights.publishing import collect as collecting

    bus, run = chain.bus, chain.folder.id
    pins = await collecting.pinned(bus, run)
    async with await Bus.connect(bus.connection.url, role="trainer", credentials=bus.credentials) as trainer:
        gone = await collecting.collect(
            bus,
            lambda subject: trainer.purge(chains.STREAM, subject=subject),
            run,
            chains=args.chains,
            pins=pins,
            trust=chain.trust,
            purge_manifests=lambda subject: retention.purge_all(trainer, chains.STREAM, subject),
        )
    location = chain.snapshots.location
    if objects := await full.sweep(bus, run, location):
        say(f"removed {len(objects)} full snapshots at {location.url}: {', '.join(objects)}")
    if gone:
        say(f"removed {len(gone)} versions, {min(gone)} to {max(gone)}, and {sum(gone.values())} messages")
    else:
        say(f"nothing to remove: the newest {args.chains} chains and the pinned versions need every version")
    return 0
