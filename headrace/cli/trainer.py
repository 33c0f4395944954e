"""Commands about a trainer: the memory that it needs, and its ranks on another machine.

`trainer plan` prints the bytes per device by cause, and whether they fit. CONFIG is a run's TOML, or a Hugging Face
folder (or its config.json). Of a folder only the shape is read; the rest is the default configuration with a learning
rate of 1e-6 and sequences as long as a micro-batch. `--set` changes it, such as trainer.micro_tokens, and so do the
settings that the plan prints as one that fits. With [trainer] offload it also prints the bytes of the host's memory, of
all processes of a node together.

`trainer join` runs on every machine but the actor's, which is node 0. A node's number and the address of node 0 may
come from the variables of torchrun and of Slurm: NODE_RANK, GROUP_RANK or SLURM_NODEID, and MASTER_ADDR with
MASTER_PORT. Under torchrun these two are the address of its agent's store, so they are not read there.

`trainer set` and `trainer rollback` are orders to the trainer of a run, which its next manifest follows and names.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_config_file, add_elsewhere, add_run, add_set, group, integer, number
from headrace.config import load
from headrace.launch.admission import own
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cli.arguments import Commands
    from headrace.training.figures.layout import Layout
    from headrace.training.memory_plan import MemoryPlan


def add(commands: "Commands") -> None:
    """Declare the commands of the group."""
    subcommands = group(commands, "trainer", "plan a trainer's memory; join its ranks; give it orders")
    for declare in (_add_plan, _add_join, _add_set, _add_rollback):
        declare(subcommands)


LEARNING_RATE = 1e-6

"""For a folder: it decides how many weights an update changes, and so what the undo entries of versions need."""


def _add_plan(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("plan", help="print the memory of a trainer by cause, and whether it fits")
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or a folder with config.json")
    parser.add_argument("--gpus", type=integer(1), metavar="N", help="devices of a node (trainer.node_ranks)")
    parser.add_argument("--nodes", type=integer(1), metavar="N", help="nodes that share one copy of the state")
    parser.add_argument("--gpu-gib", type=number(0, above=True), default=80.0, metavar="GIB", help="memory per device")
    parser.add_argument(
        "--skew", type=number(1), default=1.0, metavar="TIMES", help="rows of the busiest experts, in balanced ones"
    )
    add_set(parser)
    parser.set_defaults(handler=plan)


def plan(args: argparse.Namespace) -> int:
    """Print the plan; 0 if a fifth of the memory stays free, 1 otherwise."""
    from headrace.policy.config import CheckpointError
    from headrace.policy.layout import hugging_face, sizes
    from headrace.training import memory_plan
    from headrace.training.figures.layout import layout_of

    path = Path(args.config)
    shape = path.is_dir() or path.suffix == ".json"
    try:
        if shape:
            config = load("", [f"algorithm.learning_rate={LEARNING_RATE}", *args.set])
            policy = hugging_face.read(path if path.is_dir() else path.parent)
        else:
            config = own(args.config, args.set)
            policy = hugging_face.of_run(config)
        layout = layout_of(config)
        cpu = config.trainer.device == "cpu"
        layout = layout._replace(
            devices=(args.gpus or layout.local) * (args.nodes or layout.nodes) // layout.copies,
            cpu=cpu,
            nodes=args.nodes or layout.nodes,
            longest=0 if shape else layout.longest,
            skew=args.skew,
        )
        memory = memory_plan.plan(policy, layout)
        available = int(args.gpu_gib * memory_plan.GIB)
        limit = (1.0 - memory_plan.SPARE) * available
        fits = memory.total <= limit
        other = None if fits else memory_plan.fitting(policy, layout, available)
    except (CheckpointError, ValueError) as error:
        raise RunError(str(error), 2) from None
    count = sizes.parameters(policy)
    say(f"{count.total / 1e9:.2f} G parameters, {count.experts / 1e9:.2f} G of them in experts; {words(layout)}")
    if not layout.exact:
        say(f"ordinary mode, attention: {memory_plan.attention_refusal(policy, layout) or 'by varlen_attn'}")
    alone = ": the longest sequence, by limits.context_tokens" if layout.longest > layout.tokens else ""
    say(f"micro-batches of up to {layout.inputs} inputs{alone}")
    for line in table(memory):
        say(line)
    devices = layout.local
    if layout.offload:
        say(f"in the host's memory {hosts(memory, devices)} for {devices} processes, each with")
        for line in rows({**memory.host._asdict(), "total": memory.host.total}):
            say(line)
    verdict = "fits" if fits else "does not fit"
    nodes = f"{layout.nodes} nodes of " if layout.nodes > 1 else ""
    spare = f"with {memory_plan.SPARE:.0%} to spare ({limit / memory_plan.GIB:.1f} GiB)"
    say(f"{verdict} {nodes}{devices} x {args.gpu_gib:g} GiB {spare}")
    if not fits and other is None:
        say(f"no setting makes it fit: use more {'memory' if layout.cpu else 'devices'}")
    elif not fits and other is not None:
        there = memory_plan.plan(policy, other)
        host = f", and {hosts(there, devices)} of the host's memory" if other.offload else ""
        say(f"fits with {words(other)}: {there.total / memory_plan.GIB:.1f} GiB of each device{host}")
    return 0 if fits else 1


def hosts(memory: "MemoryPlan", processes: int) -> str:
    """The bytes of the host's memory for all processes of a node."""
    return f"{processes * memory.host.total / (1 << 30):.2f} GiB"


def table(memory: "MemoryPlan") -> list[str]:
    """A line per cause, in GiB, and the total."""
    return rows({**memory.causes, "total": memory.total})


def rows(causes: "Mapping[str, int]") -> list[str]:
    """A line for each cause that has bytes."""
    return [f"{name:>12} {value / (1 << 30):9.2f} GiB" for name, value in causes.items() if value]


def words(layout: "Layout") -> str:
    """A layout as the configuration keys that give it."""
    from headrace.training.figures.layout import settings

    keys = settings(layout).items()
    return ", ".join(f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys)


def _add_set(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("set", help="change settings of a run from the trainer's next step on")
    add_run(parser, optional=False)
    parser.add_argument("entries", nargs="+", metavar="algorithm.KEY=VALUE", help="settings of [algorithm]")
    add_elsewhere(parser)
    parser.set_defaults(handler=change)


async def change(args: argparse.Namespace) -> int:
    """Order the settings and wait for the trainer's answer."""
    from headrace.config import parse

    algorithm = parse("", "trainer set", args.entries).algorithm
    settings: dict[str, float | int | str | bool] = {}
    for entry in args.entries:
        section, _, key = entry.partition("=")[0].strip().partition(".")
        if section != "algorithm" or "." in key:
            raise RunError(f"expected algorithm.KEY=VALUE, got {entry!r}")
        settings[key] = getattr(algorithm, key)
    return await order(args, settings=settings)


def _add_rollback(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("rollback", help="take the trainer back to a version, with its optimizer")
    add_run(parser, optional=False)
    parser.add_argument("--to", type=integer(0), required=True, metavar="VERSION", help="one whose checkpoint is kept")
    add_elsewhere(parser)
    parser.set_defaults(handler=lambda args: order(args, restore=args.to))


ANSWER_S = 30.0
"""Seconds in which a trainer answers an order; it hears orders while a step computes."""


async def order(args: argparse.Namespace, **fields: Any) -> int:
    """Publish an order and print the trainer's answer; RunError when it is refused or not answered."""
    import asyncio

    from headrace.launch.session import run_of
    from headrace.messages.operations import Event
    from headrace.messages.subjects import EVENT
    from headrace.messages.training import TrainerOrder

    async with run_of(args.run, args.config) as (run, bus, *_):
        where = EVENT.at(run=run, actor="operator", type=TrainerOrder.type_name)
        seq = await bus.publish(where, TrainerOrder(run=run, **fields))
        try:
            async with asyncio.timeout(ANSWER_S):
                answers = EVENT.where(run=run, actor="trainer", type="event")
                async for received in bus.follow("HR_EVENT", answers, start=seq):
                    answer = received.message
                    if isinstance(answer, Event) and answer.data.get("order") == seq:
                        break
        except TimeoutError:
            raise RunError(
                f"the trainer of run {run} did not answer within {ANSWER_S:.0f} s. The order stays in the stream and a "
                "trainer that starts later follows it",
                1,
            ) from None
    if answer.level != "info":
        raise RunError(answer.text, 1)
    say(answer.text)
    return 0


NUMBERS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Variables with this node's number; the first that is set counts."""


def _add_join(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("join", help="start this machine's ranks of a trainer on several nodes")
    add_config_file(parser, "configuration of the run, the same as on the trainer's machine")
    parser.add_argument("--node", type=integer(1), metavar="N", help=f"this machine's number (default: {NUMBERS[0]})")
    parser.add_argument(
        "--master",
        default="",
        metavar="HOST:PORT",
        help="the trainer's machine (default: MASTER_ADDR and MASTER_PORT, else trainer.rendezvous)",
    )
    parser.add_argument(
        "--wait", type=number(0, above=True), metavar="S", help="end after so long without a trainer (default: never)"
    )
    parser.add_argument("--once", action="store_true", help="end when the trainer stops, instead of waiting again")
    parser.set_defaults(handler=join)


def join(args: argparse.Namespace) -> int:
    """Run this machine's ranks until SIGTERM; 1 when the trainer refuses this node."""
    config = args.settings
    node = node_of(os.environ) if args.node is None else args.node
    address = args.master or master_of(os.environ) or config.trainer.rendezvous
    if config.trainer.nodes == 1:
        raise RunError("trainer.node_ranks: expected fewer than the processes of trainer.mesh in a run that nodes join")
    if node is None:
        raise RunError(f"expected this machine's number: --node N, or one of {', '.join(NUMBERS)}")

    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise RunError("expected one process of a machine, which starts its ranks itself: torchrun --nproc-per-node 1")

    from headrace.training.parallel.nodes import join as joining

    joining.join(config, node, address, say, wait_s=args.wait or 0.0, once=args.once)
    return 0


def node_of(environment: Mapping[str, str]) -> int | None:
    """This machine's number; None when no variable has one. RunError for another text than a number."""
    for name in NUMBERS:
        if text := environment.get(name, ""):
            if not text.isdecimal():
                raise RunError(f"{name}: expected a number, got {text!r}")
            return int(text)
    return None


def master_of(environment: Mapping[str, str]) -> str:
    """HOST:PORT of the trainer's machine; empty when no variables have it, and under torchrun."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return ""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return f"{host}:{port}" if host and port else ""
