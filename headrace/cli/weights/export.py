"""`headrace weights export`: write a published version as a safetensors file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, add_version, declare
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "export", "write a version as a safetensors file", export)
    parser.add_argument("path", help="file to write")
    add_common(parser)
    add_version(parser)


async def export(chain: "Chain", args: argparse.Namespace) -> int:
    """Rebuild the version from the stream and write it."""
    from headrace.weights import chain as chains
    from headrace.weights import report

    head = await report.commit_of(chain.bus, chain.folder.id, args.version)
    target = Path(args.path)
    if target.exists():
        raise RunError(f"{target} exists already: name another file")
    await chains.obtain(
        chain.bus, head, target, lambda version, state_hash: None, trust=chain.trust, fetch=chain.snapshots.fetch
    )
    say(f"version {head.version} of run {chain.folder.id} in {target}, state {head.state_hash}")
    return 0
