"""`headrace images build`: builds a Dockerfile into the store, by buildah."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.cli.images.output import show

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("build", help="build a Dockerfile by buildah and store the image")
    parser.add_argument("path", help="folder with a Dockerfile, or a Dockerfile, whose folder is the context then")
    parser.add_argument("--file", default="", help="the Dockerfile, relative to the folder")
    parser.add_argument("--name", default="", help="its name in the store; default: the folder's")
    parser.add_argument("--tag", default="", help="reference by which tasks may name it; default: NAME:latest")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="value of an ARG")
    parser.add_argument("--timeout-s", type=integer(1), default=3600, help="seconds until a build is ended")
    parser.add_argument("--memory-mb", type=integer(64), default=0, help="memory of its machines; default: 512")
    add_config(parser)
    parser.set_defaults(handler=build_image)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def build_image(args: argparse.Namespace) -> int:
    """Build and store the image; print a JSON line about it."""
    from headrace.config import load
    from headrace.vmhost.images import building, imported

    cache = Path(load(args.config, args.set).environment.cache_dir).absolute()
    request = imported.Request(name=args.name, memory_mb=args.memory_mb or imported.MEMORY_MB)
    options = building.BuildOptions(
        file=args.file, reference=args.tag, arguments=tuple(args.build_arg), timeout_s=args.timeout_s
    )
    show(building.build(cache, Path(args.path), request, options, _tell))
    return 0
