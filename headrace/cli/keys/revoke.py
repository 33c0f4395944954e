"""`headrace keys revoke`: end an API key. A running gateway refuses it from the next request on."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("revoke", help="end a key; its requests are refused at once")
    parser.add_argument("id", help="id of the key, as `headrace keys list` shows it")
    add_config(parser)
    parser.set_defaults(handler=revoke)


def revoke(args: argparse.Namespace) -> int:
    """Remove the key."""
    from headrace.cli.keys.session import keys_of
    from headrace.gateway.tenants.keys import KeyFileError
    from headrace.launch.output import say
    from headrace.launch.runs import RunError

    try:
        entry = keys_of(args).revoke(args.id)
    except KeyFileError as error:
        raise RunError(str(error)) from None
    say(f"key {entry.id} of {entry.tenant} is revoked")
    return 0
