"""`headrace images build`: builds an image from a Dockerfile with buildah, and stores it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.cli.images.output import show
from headrace.terminal_text import plain

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("build", help="build an image from a Dockerfile with buildah, and store it")
    parser.add_argument("path", help="folder with a Dockerfile, or a Dockerfile; its folder is the build context")
    parser.add_argument("--file", default="", help="the Dockerfile, relative to the folder")
    parser.add_argument("--name", default="", help="name of the image in the store; default: the folder's name")
    parser.add_argument("--tag", default="", help="reference by which tasks may name the image; default: NAME:latest")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="value of an ARG")
    parser.add_argument("--timeout-s", type=integer(1), default=3600, help="time limit of the build in seconds")
    parser.add_argument("--memory-mb", type=integer(64), default=0, help="memory of the image's machines; default: 512")
    add_config(parser)
    parser.set_defaults(handler=build_image)


def _tell(line: str) -> None:
    sys.stderr.write(f"{plain(line)}\n")


def build_image(args: argparse.Namespace) -> int:
    """Build and store the image; print its description as a JSON line."""
    from headrace.launch.admission import own
    from headrace.vmhost.images import building, imported

    cache = Path(own(args.config, args.set).environment.cache_dir).absolute()
    request = imported.Request(name=args.name, memory_mb=args.memory_mb or imported.MEMORY_MB)
    options = building.BuildOptions(
        file=args.file, reference=args.tag, arguments=tuple(args.build_arg), timeout_s=args.timeout_s
    )
    show(building.build(cache, Path(args.path), request, options, _tell))
    return 0
