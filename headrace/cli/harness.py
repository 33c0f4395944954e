"""`headrace harness`: makes the bundles of the programs that act in the sandboxes of this host."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_config
from headrace.launch.output import say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


class BundleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a bundle that the command prints."""

    name: str
    version: str
    digest: str
    folder: str
    programs: tuple[str, ...]


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("harness", help="make the bundle of a harness, once on every host with sandboxes")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="mini-swe-agent, codex, claude-code, opencode, or a table [harnesses.NAME]; default: what [harness] names",
    )
    add_config(parser)
    parser.set_defaults(handler=harness)


def harness(args: argparse.Namespace) -> int:
    """Make the bundles that are missing and print each as a JSON line. ConfigError, BundleError."""
    from headrace.config import ConfigError
    from headrace.harnesses import bundles, programs

    config = args.settings
    known = programs.programs(config)
    for name in args.names or programs.wanted(config):
        if name not in known:
            raise ConfigError(f"expected one of {', '.join(known)}, got {name!r}")
        bundle = bundles.make(Path(config.environment.cache_dir).absolute(), known[name])
        say_report(
            BundleReport(
                name=name,
                version=known[name].version,
                digest=bundle.digest,
                folder=str(bundle.folder),
                programs=tuple(bundle.runners),
            )
        )
    return 0
