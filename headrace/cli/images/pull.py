"""`headrace images pull`: downloads a container image from a registry into the store."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.cli.images.output import show
from headrace.launch.output import complain

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "pull", help="store a container image from a registry; an interrupted download continues"
    )
    parser.add_argument("reference", help="such as docker.io/org/app:1.2, or with @sha256:...")
    parser.add_argument("--name", default="", help="name of the image in the store; default: from its tag")
    parser.add_argument("--memory-mb", type=integer(64), default=0, help="memory of the image's machines; default: 512")
    add_config(parser)
    parser.set_defaults(handler=pull)


def pull(args: argparse.Namespace) -> int:
    """Pull the image; print its description as a JSON line."""
    from headrace.launch.admission import own
    from headrace.vmhost.images import imported, registry

    cache = Path(own(args.config, args.set).environment.cache_dir).absolute()
    request = imported.Request(name=args.name, memory_mb=args.memory_mb or imported.MEMORY_MB)
    show(registry.pull(cache, args.reference, request, complain))
    return 0
