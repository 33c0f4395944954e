"""`headrace gate`: the stage of the candidate, and every verdict so far with its numbers."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gate", help="show the stage of the candidate, and every verdict so far")
    add_run(parser)
    parser.set_defaults(handler=gate)


def gate(args: argparse.Namespace) -> int:
    """Print one JSON line per verdict, and a last line with the present state."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped
    from headrace.ledger.gate import GateLine
    from headrace.messages.product import GateState, GateVerdict, gate_key
    from headrace.messages.subjects import EVENT

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            where = EVENT.where(run=folder.id, actor="feedback", type=GateVerdict.type_name)
            async for received in bus.history("HR_EVENT", where):
                say_report(GateLine(verdict=received.message))
            entry = await (await bus.kv("HR_PRODUCT")).get(gate_key(folder.id))
            state = entry[0] if entry is not None and isinstance(entry[0], GateState) else GateState(run=folder.id)
            say_report(GateLine(now=state))
        return 0

    return looped(body())
