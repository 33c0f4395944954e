"""`headrace config explain`: the value of one key, the layer that set it, its range and its meaning."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("explain", help="a key's value, the layer that set it, its range and its meaning")
    parser.add_argument("key", metavar="SECTION.KEY", help="such as curriculum.group_size")
    add_config(parser)
    parser.set_defaults(handler=explain)


def explain(args: argparse.Namespace) -> int:
    """Print a line per fact."""
    import msgspec

    from headrace.config.explaining import explain as about
    from headrace.launch.output import say

    found = about(args.key, args.config, args.set)
    value, default = (msgspec.json.encode(entry).decode() for entry in (found.value, found.default))
    say(f"{found.key} = {value}")
    for name, text in (
        ("from", found.source),
        ("type", found.type),
        ("default", default),
        ("meaning", found.meaning),
    ):
        say(f"  {name:<8} {text}")
    return 0
