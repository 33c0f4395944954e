"""`headrace weights verify`: rebuild published versions from the stream; check every hash and signature."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, add_version, declare
from headrace.launch.output import complain, say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    text = "rebuild and hash the whole chain from the stream, or with --version one version"
    parser = declare(commands, "verify", text, verify)
    add_common(parser)
    add_version(parser)


async def verify(chain: "Chain", args: argparse.Namespace) -> int:
    """Print what was verified; 1 when a hash or a signature is wrong."""
    from headrace.weights import report

    if args.version < 0:
        good, text = await report.verify_all(chain.bus, chain.folder.id, chain.trust, chain.snapshots.fetch)
    else:
        good, text = await report.verify(
            chain.bus, chain.folder.id, args.version, trust=chain.trust, fetch=chain.snapshots.fetch
        )
    if not good:
        for line in text.splitlines():
            complain(line)
        return 1
    say(text)
    return 0
