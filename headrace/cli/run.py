"""Commands that start a run, show whether it can start, and end it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.actors.registry import ACTORS
from headrace.cli.arguments import add_config, add_config_file, add_run, integer, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config


def add(commands: "Commands") -> None:
    """Declare the commands."""
    for declare in (_add_up, _add_check, _add_down, _add_chaos, _add_actor, _add_deploy):
        declare(commands)


def _add_up(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="start a whole run on this machine and follow it")
    add_config_file(parser, "configuration, such as deploy/demo.toml")
    parser.set_defaults(handler=up)


def up(args: argparse.Namespace) -> int:
    """Start the run; returns when it has ended and every process is gone."""
    from headrace.launch.session import looped
    from headrace.launch.up import up as start

    refuse_data(args.settings)
    return looped(start(args.settings))


def refuse_data(config: "Config") -> None:
    """Refuse data of mid-training that is not right. DataError, RendererError."""
    if not config.mid_training.data or not config.mid_training.tokens:
        return
    from headrace.actors.trainer import initial_policy

    initial_policy.check_data(config)


def _add_check(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("check", help="find what would prevent a run from starting; start nothing")
    add_config_file(parser, "configuration; default: all defaults", optional=True)
    parser.add_argument(
        "--explain",
        default="",
        metavar="SECTION.KEY",
        help="check nothing; print this key's value, the layer that set it, its range and its meaning",
    )
    parser.add_argument(
        "--role", action="append", default=[], choices=tuple(ACTORS), help="an actor of this machine; default: all"
    )
    parser.set_defaults(handler=check)


async def check(args: argparse.Namespace) -> int:
    """Print a line per finding, problems first; 1 when there is a problem, 2 when the configuration is wrong."""
    from headrace.launch.checks import host
    from headrace.launch.output import say

    config = args.settings
    if args.explain:
        return explain(args)

    findings = [finding async for finding in host.check(config, frozenset(args.role))]
    for finding in sorted(findings, key=lambda finding: finding.good):
        say(f"{'ok  ' if finding.good else 'BAD '} {finding.part}: {finding.text}")
    return 0 if all(finding.good for finding in findings) else 1


def explain(args: argparse.Namespace) -> int:
    """Print the value, its source, type, default and meaning, one per line."""
    import msgspec

    from headrace.config.explaining import explain as about
    from headrace.launch.output import say

    explanation = about(args.explain, args.config, args.set)
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


def _add_down(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("down", help="end the active run and every process of it")
    add_run(parser)
    parser.add_argument("--dir", default="runs", help="folder of the runs; default: runs")
    parser.add_argument(
        "--drain",
        type=number(0),
        default=10.0,
        metavar="SECONDS",
        help="time that processes get to end by themselves; default: 10",
    )
    parser.set_defaults(handler=down)


def down(args: argparse.Namespace) -> int:
    """End the run; 1 when a process is left that could not be ended."""
    from headrace.launch import runs
    from headrace.launch.output import say
    from headrace.launch.supervision.down import down as end

    root = Path(args.dir)
    folder = runs.find(args.run, root)
    ended = end(root, folder.path, args.drain)
    text = f"run {folder.id}: {ended.how}"
    if ended.leftovers:
        text += f"; {ended.leftovers} left-over processes were killed"
    say(f"{text}; {ended.remaining or 'no'} processes are left")
    return 1 if ended.remaining else 0


def _add_actor(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("actor", help="start one actor on this node, or several")
    parser.add_argument("names", metavar="NAME[,NAME...]", help=f"{', '.join(ACTORS)}; NAME:ID sets the actor's id")
    add_config(parser, required=True)
    parser.add_argument("--run", default="", help="run id; default: [run] id of the configuration")
    parser.add_argument("--url", default="", help="broker; default: [bus] url of the configuration")
    parser.add_argument("--credentials", default="", help="folder of per-role credentials")
    parser.set_defaults(handler=actor)


def actor(args: argparse.Namespace) -> int:
    """Run the actors in this process."""
    from headrace.launch.serve import serve

    return serve(args.settings, args.names.split(","), args.run, args.url, args.credentials)


def _add_chaos(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("chaos", help="start a run like `up`; inject faults into its processes")
    add_config_file(parser, "configuration, such as deploy/demo.toml")
    parser.add_argument(
        "--kills", type=integer(1), default=200, help="number of faults; a run that is too short for them is lengthened"
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=("kill", "stop", "cut"),
        default=("kill", "stop", "cut"),
        help="kinds of fault, all by default: kill -9, SIGSTOP for a while, cut connections",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the fault plan")
    parser.add_argument("--minutes", type=number(0, above=True), default=60.0, help="time limit of the run")
    parser.set_defaults(handler=chaos)


def chaos(args: argparse.Namespace) -> int:
    """Start the run and the fault injector; 1 when the audit does not balance or a fault was not injected."""
    from headrace.chaos.run import chaos as inject
    from headrace.launch.session import looped

    return looped(inject(args))


KINDS = ("systemd", "slurm", "k8s")


def _add_deploy(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("deploy", help="write systemd units, a Slurm job or Kubernetes manifests")
    parser.add_argument("kind", choices=KINDS, help="the program that runs the processes")
    parser.add_argument("folder", metavar="DIR", help="folder for the files; existing files are replaced")
    add_config(parser, required=True, text="configuration with [run] id, [bus] url and credentials")
    parser.add_argument(
        "--image", default=f"headrace:{__version__}", help="container image (k8s); default: of this version"
    )
    parser.add_argument("--binary", default="/opt/headrace/bin/headrace", help="path of headrace (systemd, slurm)")
    parser.add_argument("--nodes", type=integer(1), default=1, help="nodes of the job (slurm)")
    parser.set_defaults(handler=deploy)


def deploy(args: argparse.Namespace) -> int:
    """Write the files and print their paths."""

    from headrace.bus.broker.websocket import ANYWHERE
    from headrace.launch.deploy import kubernetes, slurm, systemd
    from headrace.launch.deploy.plan import broker_conf
    from headrace.launch.output import say

    config, toml = args.settings, Path(args.config).read_text()
    files = {
        "systemd": lambda: systemd.files(config, args.binary),
        "slurm": lambda: slurm.files(config, args.binary, args.nodes),
        "k8s": lambda: kubernetes.files(config, toml, broker_conf(config, host=ANYWHERE), args.image),
    }[args.kind]()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        say(str(folder / name))
    return 0
