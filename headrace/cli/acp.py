"""`headrace acp`: an agent for editors that speak the Agent Client Protocol, over standard input and output."""

import argparse
import asyncio
import importlib.util
from typing import TYPE_CHECKING, cast

from headrace.cli.arguments import add_key, key_of

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("acp", help="serve a gateway's agents to an editor (Agent Client Protocol, stdio)")
    parser.add_argument("--url", required=True, help="address of the gateway, such as http://127.0.0.1:8080")
    add_key(parser)
    parser.set_defaults(handler=serve)


def serve(args: argparse.Namespace) -> int:
    """Serve until the editor closes the streams."""
    from headrace.config import ConfigError

    if importlib.util.find_spec("acp") is None:
        raise ConfigError("headrace acp needs the package agent-client-protocol: pip install 'headrace[acp]'")
    asyncio.run(_serve(args.url, key_of(args)))
    return 0


async def _serve(url: str, key: str) -> None:
    import acp

    from headrace.gateway.acp.adapter import Adapter
    from headrace.gateway.acp.api import AgentsApi

    async with AgentsApi(url, key) as api:
        await acp.run_agent(cast(acp.Agent, Adapter(api)))
