"""Argument types and options that several commands share.

An argument type raises `argparse.ArgumentTypeError` with a sentence that says what was expected, so that argparse ends
with exit code 2 before a command imports anything heavy.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

KEY = "HEADRACE_API_KEY"
RUN_HELP = "run id, path or 'latest'"


def integer(minimum: int) -> Callable[[str], int]:
    """An argument type: a decimal integer of at least `minimum`."""

    def convert(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()) or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, got {text!r}")
        return int(text)

    return convert


def number(minimum: float, *, above: bool = False) -> Callable[[str], float]:
    """An argument type: a finite number of at least (or, with `above`, greater than) `minimum`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(f"expected a number {'>' if above else '>='} {minimum:g}, got {text!r}")
        return value

    return convert


def setting(text: str) -> tuple[str, str]:
    """An argument type: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def add_run(parser: argparse.ArgumentParser, *, optional: bool = True) -> None:
    """The argument `run`. optional: the newest run is the default."""
    if optional:
        parser.add_argument("run", nargs="?", default="latest", help=f"{RUN_HELP} (default)")
    else:
        parser.add_argument("run", help=RUN_HELP)


def add_elsewhere(parser: argparse.ArgumentParser) -> None:
    """`--config`, for a run that has no folder here because its actors were started one by one."""
    parser.add_argument(
        "--config", default="", metavar="TOML", help="find the run by [run] id and [bus] url instead of its folder"
    )


def group(commands: "Commands", name: str, text: str) -> "Commands":
    """A command with subcommands, which the result declares."""
    return commands.add_parser(name, help=text).add_subparsers(dest="subcommand", required=True, metavar="COMMAND")


def add_config(parser: argparse.ArgumentParser, *, required: bool = False, text: str = "configuration file") -> None:
    """`--config` and `--set`: the operator's own configuration, which `main` reads into `args.settings`."""
    parser.add_argument("--config", required=required, default="", metavar="TOML", help=text)
    add_set(parser)
    parser.set_defaults(own=True)


def add_config_file(parser: argparse.ArgumentParser, text: str, *, optional: bool = False) -> None:
    """As `add_config`, with the file as an argument."""
    parser.add_argument("config", nargs="?" if optional else None, default="", metavar="TOML", help=text)
    add_set(parser)
    parser.set_defaults(own=True)


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set`: overrides of single keys."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one configuration key"
    )


def add_changes(parser: argparse.ArgumentParser, text: str) -> None:
    """`--with`: changes to a recorded run's configuration."""
    parser.add_argument("--with", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """`--plugin`: names that a recorded run's records and configuration may have; `main` admits them."""
    parser.add_argument(
        "--plugin",
        dest="plugins",
        action="append",
        default=[],
        metavar="SEAM=MODULE:ATTRIBUTE",
        help="import this part from outside where the recorded run names it, such as rewards=my_rewards:half",
    )


def text_of(option: str, path: Path) -> str:
    """The text of a file that an option names. ConfigError when there is none or its bytes are no UTF-8."""
    from headrace.config import ConfigError

    try:
        if path.exists() and not path.is_file():  # a pipe may never be written to
            raise ConfigError(f"{option}: expected a file, {path} is a folder, a pipe or a device")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error.strerror}); expected a file of text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: expected UTF-8, byte {error.start} of {path} is none") from None


def add_key(parser: argparse.ArgumentParser) -> None:
    """The option `--key-file` of a client of the gateway; `key_of` reads it."""
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=f"file with the API key; default: ${KEY}")


def key_of(args: argparse.Namespace) -> str:
    """The API key. ConfigError."""
    from headrace.config import ConfigError

    key = text_of("--key-file", args.key_file).strip() if args.key_file else os.environ.get(KEY, "")
    if not key:
        raise ConfigError(f"expected an API key: --key-file FILE or ${KEY} (headrace keys --add TENANT)")
    return key
