"""`headrace replay`: run a recorded step, several steps, a bundle or a trajectory's tool calls again, and compare.

The result is one JSON line (one per step with `--steps`); NaN and infinity are null there. The exit code is 0 only if
the results are equal.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import add_changes, add_plugins, integer
from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.replay.recorded_run import RecordedRun
    from headrace.replay.step import Rerun

MODES = ("--step", "--steps", "--trajectory")


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("replay", help="run a recorded step or trajectory again and compare the results")
    parser.add_argument("run", help="run id, path or 'latest'; or the folder of a bundle")
    parser.add_argument("--step", type=int, help="replay one step and compare its bits")
    parser.add_argument("--steps", type=integer(1), metavar="COUNT", help="replay COUNT steps, drawn with --seed")
    parser.add_argument("--seed", type=int, default=1, help="seed that draws the steps of --steps")
    parser.add_argument("--trajectory", metavar="ID", help="repeat the tool calls of a trajectory in a fresh sandbox")
    parser.add_argument("--debug", action="store_true", help="stop before the backward pass, in pdb")
    parser.add_argument("--to", default="", metavar="DIR", help="write a bundle that replays without broker and run")
    add_changes(parser, "take the step with another objective and report the difference")
    add_plugins(parser)
    parser.set_defaults(handler=replay)


def replay(args: argparse.Namespace) -> int:
    """Check the combination of options, then run the mode they choose."""
    from headrace.launch.admission import changes
    from headrace.replay.recorded_run import ReplayError
    from headrace.training.device import TrainerError

    _check(args)
    changes(args.changes)
    try:
        if args.trajectory is not None:
            return _looped(_trajectory(args))
        if args.steps is not None:
            return _looped(_steps(args))
        if args.debug:
            return _debug(args)
        return _looped(_step(args))
    except (ReplayError, TrainerError) as error:
        raise RunError(str(error), 1) from None


def _looped(body: Coroutine[Any, Any, int]) -> int:
    from headrace.launch.session import looped

    return looped(body)


def _check(args: argparse.Namespace) -> None:
    """RunError for arguments that contradict each other."""
    values = (args.step, args.steps, args.trajectory)
    given = [name for name, value in zip(MODES, values, strict=True) if value is not None]
    bundle = _is_bundle(args.run)
    if len(given) > 1 or not (given or bundle):
        raise RunError("expected exactly one of --step N, --steps COUNT, --trajectory ID")
    if bundle and given not in ([], ["--step"]):
        raise RunError(f"{args.run} is a bundle of one step; {given[0]} needs a run")
    if given in (["--steps"], ["--trajectory"]) and (args.debug or args.to or args.changes):
        raise RunError("--debug, --to and --with work on one step: give --step N")
    if sum((bool(args.debug), bool(args.to), bool(args.changes))) > 1:
        raise RunError("--debug, --to and --with exclude each other: give one of them")


def _is_bundle(name: str) -> bool:
    from headrace.replay import bundle

    return bundle.is_bundle(Path(name))


@contextlib.asynccontextmanager
async def recorded_run_of(name: str) -> "AsyncIterator[RecordedRun]":
    """The recorded steps of a run or of a bundle. ReplayError, RunError."""
    from headrace.config import load
    from headrace.launch.session import bus_of
    from headrace.replay import bundle, recorded_run

    if _is_bundle(name):
        yield bundle.read(Path(name))
        return
    folder = runs.find(name)
    if not folder.config.is_file():
        raise RunError(f"{folder.path} holds neither a run (config.json) nor a bundle ({bundle.INDEX})")
    async with bus_of(folder, "replay") as bus:
        yield await recorded_run.of_run(bus, load(folder.config), folder.path, folder.id)


def step_of(args: argparse.Namespace, recorded: "RecordedRun") -> int:
    """The step to replay: `--step`, or the only step of a bundle."""
    return args.step if args.step is not None else next(iter(recorded.manifests))


def _say(line: msgspec.Struct) -> None:
    say(msgspec.json.encode(line).decode())


def _warn(rerun: "Rerun", step: int) -> None:
    if rerun.strayed >= 0:
        complain(f"step {step} starts from weights that differ from the recorded ones since step {rerun.strayed}")


async def _step(args: argparse.Namespace) -> int:
    from headrace.replay import bundle
    from headrace.replay.objective import differ
    from headrace.replay.step import Rerun, attempt, compare

    async with recorded_run_of(args.run) as recorded:
        step = step_of(args, recorded)
        with Rerun(recorded) as rerun:
            if args.changes:
                difference = await differ(rerun, step, args.changes)
                _warn(rerun, step)
                _say(difference)
                return 0 if difference.bitwise_equal else 1
            loaded = await rerun.reach(step)
            _warn(rerun, step)
            if args.to:
                bundle.write(recorded, loaded, Path(args.to))
                say(f"step {step} of run {recorded.run}; run it anywhere with: headrace replay {args.to}")
                return 0 if rerun.strayed < 0 else 1
            line = compare(loaded, attempt(loaded))
    _say(line)
    return 0 if line.holds else 1


def _debug(args: argparse.Namespace) -> int:
    """Fetch all records first, then run the step without an event loop, because pdb blocks the thread."""
    import uvloop

    from headrace.replay import debug
    from headrace.replay.step import Loaded, Rerun, compare

    with contextlib.ExitStack() as stack:

        async def fetch() -> Loaded:
            async with recorded_run_of(args.run) as recorded:
                rerun = stack.enter_context(Rerun(recorded))
                loaded = await rerun.reach(step_of(args, recorded), alone=True)
            _warn(rerun, loaded.manifest.step)
            return loaded

        loaded = uvloop.run(fetch())
        outcome = debug.debug(loaded)
        if outcome is None:
            raise RunError(
                f"the debugger was quit before step {loaded.manifest.step} ended, so there is no result to compare", 1
            )
        line = compare(loaded, outcome)
    _say(line)
    return 0 if line.holds else 1


async def _steps(args: argparse.Namespace) -> int:
    from headrace.replay.step import choose, replay_steps

    equal = True
    warnings: list[str] = []
    async with recorded_run_of(args.run) as recorded:
        async for line in replay_steps(recorded, choose(recorded, args.steps, args.seed), warnings):
            _say(line)
            equal = equal and line.holds
    for text in warnings:
        complain(text)
    return 0 if equal else 1


async def _trajectory(args: argparse.Namespace) -> int:
    from headrace.cli.replay import tool_calls
    from headrace.config import load
    from headrace.launch.session import bus_of

    folder = runs.find(args.run)
    config = load(folder.config)
    async with bus_of(folder, "replay") as bus:
        trajectory = await tool_calls.find(bus, folder.id, args.trajectory)
    line = await tool_calls.replay_calls(config, folder.path, trajectory)
    _say(line)
    return 0 if line.equal else 1
