"""`headrace deploy`: write the files with which systemd, Slurm, Kubernetes or compose run a configuration."""

import argparse
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.cli.arguments import add_set, integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

KINDS = ("systemd", "slurm", "k8s", "compose")


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("deploy", help="write systemd units, a Slurm job, Kubernetes manifests or compose")
    parser.add_argument("kind", choices=KINDS, help="the program that runs the processes")
    parser.add_argument("folder", metavar="DIR", help="folder for the files; existing files are replaced")
    parser.add_argument(
        "--config", required=True, metavar="TOML", help="configuration with [run] id, [bus] url and credentials"
    )
    parser.add_argument(
        "--image", default=f"headrace:{__version__}", help="container image (k8s, compose); default: of this version"
    )
    parser.add_argument("--binary", default="/opt/headrace/bin/headrace", help="path of headrace (systemd, slurm)")
    parser.add_argument("--nodes", type=integer(1), default=1, help="nodes of the job (slurm)")
    add_set(parser)
    parser.set_defaults(handler=deploy)


def deploy(args: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    from pathlib import Path

    from headrace.bus.broker.websocket import ANYWHERE
    from headrace.launch.admission import own
    from headrace.launch.deploy import compose, kubernetes, slurm, systemd
    from headrace.launch.deploy.plan import broker_conf
    from headrace.launch.output import say

    config, toml = own(args.config, args.set), Path(args.config).read_text()
    conf = broker_conf(config, host=ANYWHERE)  # in containers
    files = {
        "systemd": lambda: systemd.files(config, args.binary),
        "slurm": lambda: slurm.files(config, args.binary, args.nodes),
        "k8s": lambda: kubernetes.files(config, toml, conf, args.image),
        "compose": lambda: compose.files(config, args.image) | {"run.toml": toml, "nats.conf": conf},
    }[args.kind]()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        say(str(folder / name))
    return 0
