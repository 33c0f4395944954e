"""`headrace vm pool`: measures the time to acquire warm and cold clones of a template, and a clone's memory."""

import argparse
import statistics
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import integer
from headrace.cli.vm.session import TEMPLATE_HELP, declare
from headrace.config import Config
from headrace.launch.output import say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of warm clones of a template, compared with cold ones."""

    template: str
    clones: int
    warm_acquire_p50_ms: float
    cold_acquire_p50_ms: float
    parked_private_p50_mib: float
    """Memory that a parked clone does not share with its template."""


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "pool", "measure warm clones: time to acquire, private memory", pool)
    parser.add_argument("--template", default="light", help=TEMPLATE_HELP)
    parser.add_argument("--clones", type=integer(1), default=4, help="number of clones to keep warm and acquire")


async def pool(config: Config, args: argparse.Namespace) -> int:
    """Acquire the clones one after another; print one JSON line."""
    from headrace.vmhost.images import base
    from headrace.vmhost.qemu import figures

    base.plan(config.environment, args.template)
    changes = {"warm": args.clones, "max_vms": args.clones + 2, "judge_share": 0, "production_share": 0}
    environment = msgspec.structs.replace(config.environment, **changes)
    warm = await figures.warm(environment, args.template, args.clones)
    cold = await figures.on_demand(environment, args.template, args.clones)
    report = PoolReport(
        template=args.template,
        clones=args.clones,
        warm_acquire_p50_ms=round(statistics.median(clone.wall_ms for clone in warm), 2),
        cold_acquire_p50_ms=round(statistics.median(clone.wall_ms for clone in cold), 2),
        parked_private_p50_mib=round(statistics.median(clone.private_mib for clone in warm), 2),
    )
    say_report(report)
    return 0
