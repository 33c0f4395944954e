"""`headrace gate`: where the candidate stands, and every verdict so far with its numbers."""

import argparse
import json
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_run
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gate", help="show where the candidate stands, and every verdict so far")
    add_run(parser)
    parser.set_defaults(handler=gate)


def gate(args: argparse.Namespace) -> int:
    """One JSON line per verdict, and a last one with the present state."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped
    from headrace.messages.product import GateState, GateVerdict, gate_key
    from headrace.messages.subjects import EVENT

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            where = EVENT.where(run=folder.id, actor="feedback", type=GateVerdict.type_name)
            async for received in bus.history("HR_EVENT", where):
                say(json.dumps({"verdict": msgspec.to_builtins(received.message)}))
            entry = await (await bus.kv("HR_STATE")).get(gate_key(folder.id))
            state = entry[0] if entry is not None else GateState(run=folder.id)
            say(json.dumps({"now": msgspec.to_builtins(state)}))
        return 0

    return looped(body())
