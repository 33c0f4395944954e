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
    """Print the value, its source, type, default and meaning, one per line."""
    import msgspec

    from headrace.config.explaining import explain as about
    from headrace.launch.output import say

    explanation = about(args.key, args.config, args.set)
    value, default = (msgspec.json.encode(entry).decode() for entry in (explanation.value, explanation.default))
    say(f"{explanation.key} = {value}")
    for name, text in (
        ("from", explanation.source),
        ("type", explanation.type),
        ("default", default),
        ("meaning", explanation.meaning),
    ):
        say(f"  {name:<8} {text}")
    return 0
