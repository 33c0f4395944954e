"""`headrace vm facts`: prints the facts that a program inside a sandbox can observe."""

import argparse
import json
from typing import TYPE_CHECKING

from headrace.cli.vm.session import TEMPLATE_HELP, declare, fresh
from headrace.config import Config
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "facts", "print the facts that a program inside a sandbox can observe", facts)
    parser.add_argument("--template", default="light", help=TEMPLATE_HELP)


async def facts(config: Config, args: argparse.Namespace) -> int:
    """Print the fact sheet of a fresh sandbox as JSON."""
    from headrace.launch.guests import prepare_host
    from headrace.vmhost.images import base
    from headrace.vmhost.node import fidelity

    base.plan(config.environment, args.template)
    await prepare_host(config)
    async with fresh(config, args.template) as (_, sandbox):
        say(json.dumps(await fidelity.sheet(sandbox), indent=2))
    return 0
