"""`headrace images import`: copies a container image or a root file system into the store."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.cli.images.output import show

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    text = "store a container image (docker save, OCI layout) or a root file system"
    parser = commands.add_parser("import", help=text)
    help = "archive or folder; docker-daemon:NAME:TAG or containers-storage:NAME:TAG by skopeo"
    parser.add_argument("path", help=help)
    parser.add_argument("--name", default="", help="name of the image in the store; default: from its tag or file name")
    parser.add_argument("--tag", default="", help="the image to import from an archive of several")
    parser.add_argument("--memory-mb", type=integer(64), default=0, help="memory of the image's machines; default: 512")
    add_config(parser)
    parser.set_defaults(handler=take)


def take(args: argparse.Namespace) -> int:
    """Import the image; print its description as a JSON line."""
    from headrace.launch.admission import own
    from headrace.vmhost.images import imported, skopeo

    cache = Path(own(args.config, args.set).environment.cache_dir).absolute()
    memory = args.memory_mb or imported.MEMORY_MB
    if args.path.startswith(skopeo.TRANSPORTS):
        show(skopeo.take(cache, args.path, imported.Request(name=args.name, memory_mb=memory)))
        return 0
    show(imported.take(cache, Path(args.path), args.name, args.tag, memory))
    return 0
