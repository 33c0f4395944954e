"""`headrace weights squash`: publish the newest deltas again as a single delta, for receivers that lag.

It publishes with the weight sender's role, so it needs the sender's key.
"""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import integer
from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "squash", "publish the newest deltas as one", squash, role="weight_sync")
    add_common(parser)
    parser.add_argument("--count", type=integer(2), default=8, help="number of deltas")


async def squash(chain: "Chain", args: argparse.Namespace) -> int:
    """Publish the squashed delta and print its size."""
    from headrace.bus.broker import credentials, keys
    from headrace.weights import report
    from headrace.weights.publishing import squash as squashing

    bus, trust = chain.bus, chain.trust
    try:
        signer = keys.load(bus.credentials, credentials.PUBLISHER)
    except ValueError as error:
        raise RunError(f"{error}: `weights squash` signs its delta, so run it on the weight sender's node") from None
    head = await report.commit_of(bus, chain.folder.id, -1)
    name = chain.section.codec
    record = await squashing.publish(
        bus, bus, head, count=args.count, name=name, signer=signer, trust=trust, fetch=chain.fetch
    )
    deltas = await squashing.span(bus, head, args.count, trust)
    before = sum(delta.wire_bytes for delta in deltas)
    say(
        f"versions {record.base_version} to {record.version}: {len(deltas)} deltas of {before} bytes squashed into one "
        f"of {record.wire_bytes}"
    )
    return 0
