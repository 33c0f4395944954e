"""`headrace weights diff`: prints the differences between two published versions, per tensor."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "diff", "compare two versions", diff)
    parser.add_argument("older", type=int)
    parser.add_argument("newer", type=int)
    add_common(parser)


async def diff(chain: "Chain", args: argparse.Namespace) -> int:
    """Rebuild both versions and print the differences."""
    from headrace.weights import chain as chains
    from headrace.weights import report
    from headrace.weights.snapshot import Snapshot

    run = chain.folder.id
    with tempfile.TemporaryDirectory(prefix="headrace-diff-") as text:
        files: list[Path] = []
        for version in (args.older, args.newer):
            head = await report.commit_of(chain.bus, run, version)
            files.append(Path(text) / f"{len(files)}.safetensors")
            await chains.obtain(
                chain.bus,
                head,
                files[-1],
                lambda version, state_hash: None,
                trust=chain.trust,
                fetch=chain.snapshots.fetch,
            )
        say(f"version {args.older} to version {args.newer} of run {run}: " + report.diff(*map(Snapshot, files)))
    return 0
