"""`headrace wire`: print the fields of every message as Markdown; docs/wire.md ends with its output."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("wire", help="print every message and its fields as Markdown (docs/wire.md)")
    parser.add_argument(
        "--golden",
        metavar="FILE",
        help="add the encodings of new and changed message types to FILE (tests/messages/golden.json); "
        "exit 1 when this version reads a recorded encoding differently",
    )
    parser.set_defaults(handler=wire)


def wire(args: argparse.Namespace) -> int:
    """Print the tables, or record encodings."""
    if args.golden is not None:
        return golden(Path(args.golden))
    from headrace.cli.run import fields

    sys.stdout.write(fields.table())
    return 0


def golden(path: Path) -> int:
    """Append the present encodings that the file lacks, unless this version reads a recorded one differently."""
    from headrace.launch.output import complain, say
    from headrace.messages.golden import incompatible, read, today, unrecorded

    try:
        recordings = read(path.read_text()) if path.exists() else {}
    except ValueError as error:
        complain(f"{path} does not contain recorded messages: {error}; name the file that --golden wrote")
        return 2
    problems = incompatible(recordings)
    for problem in problems:
        complain(problem)
    if problems:
        return 1
    encoded = today()
    kinds = unrecorded(recordings)
    for kind in kinds:
        recordings.setdefault(kind, []).append(encoded[kind])
    if kinds:
        path.write_text(json.dumps(recordings, indent=1, sort_keys=True) + "\n")
    say(f"{path}: added {', '.join(kinds)}" if kinds else f"{path}: all {len(encoded)} types are recorded")
    return 0
