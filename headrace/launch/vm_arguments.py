"""The arguments of `headrace vm`, apart from what the commands do so that `--help` stays quick."""

import argparse
import math

COMMANDS = (
    ("build", "build and cache an image's template, or with --base a task's on top of another"),
    ("import", "take a container image (docker save, OCI layout) or a root file system as a template's root"),
    ("pool", "figures of warm clones: time to acquire, private memory"),
    ("shell", "a terminal in a fresh sandbox"),
    ("run", "a command in a fresh sandbox, its output as it comes"),
    ("fork", "prepare a sandbox, fork it while it runs, and run a command in every fork"),
    ("facts", "what a sandbox looks like from inside"),
    ("gc", "remove what nothing refers to"),
    ("doctor", "what this host can do, in plain words"),
)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of things: 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: seconds, more than 0")
    return seconds


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The arguments of all commands."""
    made = {}
    for name, text in COMMANDS:
        one = made[name] = commands.add_parser(name, help=text)
        one.add_argument("--config", default="")
        one.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    build = made["build"]
    build.add_argument(
        "name", nargs="?", default="light", help="light, debian, an imported image, or a new task's name"
    )
    build.add_argument("--base", default="", help="the template below; makes NAME a task template")
    build.add_argument("--push", default="", metavar="DIR", help="a folder whose content every slot gets")
    build.add_argument("--step", action="append", default=[], metavar="COMMAND", help="run by sh in every slot")
    take = made["import"]
    take.add_argument("path", help="archive or folder")
    take.add_argument("--name", default="", help="what to call it; default: from its tag or file name")
    take.add_argument("--tag", default="", help="which image of several")
    made["pool"].add_argument("--template", default="light")
    made["pool"].add_argument("--clones", type=_count, default=4, help="how many to keep warm and acquire")
    for name in ("shell", "run", "fork", "facts"):
        made[name].add_argument("--template", default="light", help="light, debian, an imported image, a task")
    for name in ("shell", "run", "fork"):
        made[name].add_argument("--push", default="", metavar="DIR", help="a folder for the workspace")
        made[name].add_argument("--user", default="", help="a user of an imported image")
    made["run"].add_argument("--pull", default="", metavar="TAR", help="keep the workspace afterwards, as an archive")
    made["run"].add_argument("--env", type=_setting, action="append", default=[], metavar="NAME=VALUE")
    made["run"].add_argument("--timeout", type=_seconds, default=3600.0, help="seconds")
    made["fork"].add_argument("--prepare", default="", metavar="COMMAND", help="run by sh before the fork")
    made["fork"].add_argument("--count", type=_count, default=2)
    for name in ("run", "fork"):
        made[name].add_argument("argv", nargs="*", metavar="COMMAND", help="after --; default: the image's own")
    made["gc"].add_argument("--forget", action="append", default=[], metavar="NAME", help="an image or task template")
    made["gc"].add_argument("--dry-run", action="store_true", help="say what is there and why, remove nothing")
