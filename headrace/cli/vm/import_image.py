"""`headrace vm import`: makes a container image or a root file system the root of a template."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.launch.output import say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    text = "import a container image (docker save, OCI layout) or a root file system"
    parser = commands.add_parser("import", help=text)
    parser.add_argument("path", help="archive or folder")
    parser.add_argument("--name", default="", help="name of the template; default: from its tag or file name")
    parser.add_argument("--tag", default="", help="the image to import from an archive of several")
    add_config(parser)
    parser.set_defaults(handler=import_image)


def import_image(args: argparse.Namespace) -> int:
    """Import the image; print its description as a JSON line."""
    from headrace.launch.admission import own
    from headrace.vmhost.images import imported

    cache = Path(own(args.config, args.set).environment.cache_dir).absolute()
    base = imported.take(cache, Path(args.path), args.name, args.tag)
    say_report(base)
    return 0
