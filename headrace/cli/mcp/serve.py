"""`headrace mcp serve`: the tools as an MCP server on the standard streams, in a fresh sandbox."""

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.vm.session import add_sandbox, declare, fresh
from headrace.config import Config, ConfigError
from headrace.messages.tasks import DEFAULT_TOOLS, TestPlan

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

NOT_SERVED = ("semantic_search", "finish")
"""Default tools that need a run: one needs its search actor, the other ends an episode."""
TOOLS = (*(name for name in DEFAULT_TOOLS if name not in NOT_SERVED), "keyword_search")


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "serve", "serve the tools over standard input and output to an agent", serve)
    add_sandbox(parser)
    parser.add_argument("--pull", default="", metavar="TAR", help="write the workspace to an archive afterwards")
    parser.add_argument("--tools", nargs="+", default=TOOLS, metavar="TOOL", help="tools to serve")
    parser.add_argument(
        "--tests", nargs="*", default=(), metavar="PATH", help="paths that the tool run_tests passes to pytest"
    )


async def serve(config: Config, args: argparse.Namespace) -> int:
    """Serve until the client closes the streams."""
    from headrace.harness.mcp import serve as mcp
    from headrace.harness.tools.registry import schemas_of
    from headrace.messages.sandbox import PullTar
    from headrace.registry import PluginError, admit
    from headrace.vmhost.errors import VmhostError

    if importlib.util.find_spec("mcp") is None:
        raise VmhostError("headrace mcp serve needs the package mcp: pip install 'headrace[mcp]'")
    try:
        admit("tools", args.tools)
        schemas_of(tuple(args.tools))
    except PluginError as error:
        raise ConfigError(f"--tools: {error}") from None
    async with fresh(config, args.template, args.push) as (_, sandbox):
        await mcp.serve(sandbox, args.tools, TestPlan(kind="pytest", paths=tuple(args.tests)))
        if args.pull:
            pulled = await sandbox.call(PullTar())
            if not pulled.ok:
                raise VmhostError(f"the workspace could not be pulled: {pulled.error}")
            Path(args.pull).write_bytes(pulled.data)
    return 0
