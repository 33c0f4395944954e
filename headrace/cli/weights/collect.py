"""`headrace weights collect`: removes published versions that no receiver needs any more.

It reads with the role operator and purges with the role trainer, the only role with that permission.
"""

import argparse
from pathlib import Path
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
    files = await _files_removed(chain)
    if files:
        say(f"removed {len(files)} files of full snapshots: {', '.join(map(str, files))}")
    if gone:
        say(f"removed {len(gone)} versions, {min(gone)} to {max(gone)}, and {sum(gone.values())} messages")
    else:
        say(f"nothing to remove: the newest {args.chains} chains and the pinned versions need every version")
    return 0


async def _files_removed(chain: "Chain") -> list[Path]:
    """Remove the files of collected full snapshots from the shared folder and from senders' stores in this machine's
    folder of the run. A sender on another machine removes its own at its next full snapshot."""
    from headrace.weights.transfer import retention

    run, shared = chain.folder.id, chain.section.shared_dir
    gone = await retention.sweep_shared(chain.bus, run, shared) if shared else []
    for store in sorted((chain.folder.path / "nodes").glob("*/sender")):
        gone += await retention.sweep_store(chain.bus, run, store)
    return gone
