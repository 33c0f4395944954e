"""`headrace status`: prints the live actors, the run's last step, and the versions that each region serves."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere, add_run

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.operations import Heartbeat


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="show the actors that are alive and the last step of a run")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=status)


def status(args: argparse.Namespace) -> int:
    """Print the state, the last step, evaluations, regions and actors, one per line."""
    from headrace.cli.weights import regions
    from headrace.dashboard.report import curve_of
    from headrace.launch.output import say
    from headrace.launch.session import looped, run_of
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalResult
    from headrace.messages.training import StepDone

    async def body() -> int:
        async with run_of(args.run, args.config) as run:
            beats = await _heartbeats(run.bus, run.id) if run.served else []
            last = await run.bus.last("HR_STEP", subjects.STEP.at(run=run.id))
            state = "active" if beats else "no actor is alive" if run.served else "over"
            say(f"run {run.id}: {state}")
            if last is not None and isinstance(last.message, StepDone):
                done = last.message
                say(f"step {done.step + 1}, version {done.version}, pass rate {done.pass_rate:.2f}, k1 {done.k1:+.4f}")
                if (acts := done.behaviour) is not None:
                    say(
                        f"attempts: {acts.calls_per_turn:.2f} calls a turn, {acts.reads_before_edit:.1f} reads before "
                        f"an edit, {acts.tested:.0%} tested, {acts.lint_fixed:.2f} lint errors fixed, {acts.asked:.0%} "
                        "asked the user"
                    )
            events = run.bus.history("HR_EVENT", subjects.EVENT.where(run=run.id, type=EvalResult.type_name))
            for point in curve_of([entry.message async for entry in events if isinstance(entry.message, EvalResult)]):
                say(f"version {point.version} passes {point.rate:.2f} of {point.tasks} tasks of {point.suite}")
            for line in regions.summary(await regions.look(run.bus, run.id)):
                say(line)
            for beat in beats:
                say(f"  {beat.actor:<16}{beat.id:<24}{beat.state:<10}busy {beat.busy:4.0%}  {beat.status}")
        return 0

    return looped(body())


async def _heartbeats(bus: "Bus", run: str) -> "list[Heartbeat]":
    """The newest heartbeat of every actor that serves the run."""
    from headrace.messages.operations import Heartbeat

    presence = await bus.kv("HR_PRESENCE")
    messages = [entry[0] for _, entry in sorted((await presence.items()).items())]
    return [beat for beat in messages if isinstance(beat, Heartbeat) and beat.run in ("", run)]
