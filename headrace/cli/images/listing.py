"""`headrace images list`: the images of the store."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.cli.images.output import show
from headrace.launch.output import complain

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("list", help="print a JSON line per image")
    parser.add_argument("--verify", action="store_true", help="read every blob and compare it with its digest")
    add_config(parser)
    parser.set_defaults(handler=list_images)


def list_images(args: argparse.Namespace) -> int:
    """Print the images; exit code 1 when one is damaged."""
    from headrace.launch.admission import own
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.images import imported, store

    cache = Path(own(args.config, args.set).environment.cache_dir).absolute()
    code = 0
    checked: dict[str, bool] = {}
    for name in imported.names(cache):
        image = imported.find(cache, name)
        try:
            if image is None:
                raise VmhostError(f"the description of image {name} is damaged: import or pull it again")
            show(image)
            for part in image.segments() if args.verify else ():
                if part.folder not in checked:
                    checked[part.folder] = store.intact(part)
                if not checked[part.folder]:
                    raise VmhostError(f"{part.path} was changed: run images gc --forget {name}, then pull it again")
        except VmhostError as error:
            complain(str(error))
            code = 1
    return code
