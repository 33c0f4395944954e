"""What each command does, once its arguments are parsed. One sentence and an exit code for whatever goes wrong."""

import argparse
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from headrace.config import Config, ConfigError, load
from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus


def run(args: argparse.Namespace) -> int:
    """Run the parsed command."""
    from headrace.bus.errors import BusError
    from headrace.vmhost.errors import VmhostError

    try:
        return COMMANDS[args.command](args)
    except ConfigError as error:
        return fail(str(error), 2)
    except VmhostError as error:
        return fail(str(error), 3)
    except BusError as error:
        return fail(str(error), 4)
    except RunError as error:
        return fail(str(error), error.code)
    except OSError as error:
        return fail(f"{error.filename or 'this machine'}: {error.strerror or error}", 3)


def fail(text: str, code: int) -> int:
    """Say what went wrong."""
    complain(text)
    return code


def looped(body: Awaitable[int]) -> int:
    """Run a coroutine on uvloop."""
    import uvloop

    async def main() -> int:
        return await body

    return uvloop.run(main())


@asynccontextmanager
async def bus_of(folder: RunDir, role: str = "operator") -> AsyncIterator["Bus"]:
    """A connection to a run's broker: the active one, or a loopback one on the finished run's store."""
    from headrace.bus.connection import Bus
    from headrace.bus.nearby import Nearby
    from headrace.bus.server import open_store, running

    config = load(folder.config) if folder.config.is_file() else Config()
    url, credentials, server = config.bus.url, config.bus.credentials, None
    if not url:
        credentials = str(folder.broker / "credentials")
        if not (folder.broker / "store" / "jetstream").is_dir():
            raise RunError(f"{folder.path} has no streams: no run ever had a broker there")
        found = running(folder.broker)
        server = await open_store(folder.broker) if found is None else None
        url = server.url if server is not None else found.url if found is not None else ""
    try:
        async with await Bus.connect(url, role=role, credentials=credentials) as bus:
            bus.use_nearby(Nearby.of(config.bus, folder.id, bus.node))
            yield bus
    finally:
        if server is not None:
            await server.stop()


def up(args: argparse.Namespace) -> int:
    """`headrace up`."""
    from headrace.launch.up import up as start

    return looped(start(args.config, args.set))


def chaos(args: argparse.Namespace) -> int:
    """`headrace chaos`."""
    from headrace.launch.chaos import chaos as unleash

    return looped(unleash(args))


def actor(args: argparse.Namespace) -> int:
    """`headrace actor`: the process that runs one or several actors until it is told to stop."""
    from headrace.launch.actors import serve

    config = load(args.config, args.set)
    return serve(config, args.names.split(","), args.run, args.url, args.credentials)


def audit(args: argparse.Namespace) -> int:
    """`headrace audit`: one JSON line from the streams alone."""
    from headrace.replay.audit import audit as prove

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            report = await prove(bus, folder.id)
        say(json.dumps(msgspec.to_builtins(report)))
        return 0 if report.balanced else 1

    return looped(body())


def staleness(args: argparse.Namespace) -> int:
    """`headrace staleness`: the bound that holds, or another one."""
    from headrace.launch import staleness_commands

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            if args.bound is None:
                return await staleness_commands.show(bus, folder.id)
            return await staleness_commands.change(bus, folder.id, args.bound)

    return looped(body())


def status(args: argparse.Namespace) -> int:
    """`headrace status`: who is alive, how far the run is, who serves its newest version."""
    from headrace.bus.server import running
    from headrace.launch import region_commands
    from headrace.messages import subjects
    from headrace.messages.operations import Beat
    from headrace.messages.training import StepDone

    async def body() -> int:
        folder = runs.find(args.run)
        shared = folder.config.is_file() and bool(load(folder.config).bus.url)
        active = running(folder.broker) is not None
        async with bus_of(folder) as bus:
            beats = []
            if active or shared:
                presence = await bus.kv("HR_PRESENCE")
                entries = [await presence.get(key) for key in sorted(await presence.keys())]
                found = [entry[0] for entry in entries if entry is not None]
                beats = [beat for beat in found if isinstance(beat, Beat) and beat.run in ("", folder.id)]
            active = active or bool(beats)
            last = await bus.last("HR_STEP", subjects.STEP.at(run=folder.id))
            say(f"run {folder.id}: {'active' if active else 'over'}")
            if last is not None and isinstance(last.message, StepDone):
                done = last.message
                say(f"step {done.step + 1}, version {done.version}, pass rate {done.pass_rate:.2f}, k1 {done.k1:+.4f}")
            for line in region_commands.summary(await region_commands.look(bus, folder.id)):
                say(line)
            for beat in beats:
                say(f"  {beat.actor:<16}{beat.id:<24}{beat.state:<10}busy {beat.busy:4.0%}  {beat.status}")
        return 0

    return looped(body())


def replay(args: argparse.Namespace) -> int:
    """`headrace replay`."""
    from headrace.launch import replay_commands

    return replay_commands.replay(args)


def rejudge(args: argparse.Namespace) -> int:
    """`headrace rejudge`."""
    from headrace.launch import second_lives

    return looped(second_lives.rejudge(args))


def retrain(args: argparse.Namespace) -> int:
    """`headrace retrain`."""
    from headrace.launch import second_lives

    return looped(second_lives.retrain(args))


def dlq(args: argparse.Namespace) -> int:
    """`headrace dlq`."""
    from headrace.launch.dlq_commands import dlq as handle

    return looped(handle(args))


def evaluate(args: argparse.Namespace) -> int:
    """`headrace eval`."""
    from headrace.launch.evaluating import evaluate as measure

    return looped(measure(load(args.config, args.set), args))


def tasks(args: argparse.Namespace) -> int:
    """`headrace tasks`."""
    from headrace.launch import task_commands

    if args.tasks_command == "show":
        return task_commands.show(load(args.config), args.suite, args.task)
    return looped(task_commands.from_sdist(load(args.config, args.set), args))


def vm(args: argparse.Namespace) -> int:
    """`headrace vm`."""
    from headrace.launch import vm_commands

    return vm_commands.vm(load(args.config, args.set), args)


def weights(args: argparse.Namespace) -> int:
    """`headrace weights`."""
    from headrace.launch import region_commands, weight_commands

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder, weight_commands.ROLES.get(args.weights_command, "operator")) as bus:
            if args.weights_command == "regions":
                return await region_commands.execute(bus, folder, args)
            return await weight_commands.execute(bus, folder, args)

    return looped(body())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": up,
    "chaos": chaos,
    "actor": actor,
    "audit": audit,
    "status": status,
    "replay": replay,
    "rejudge": rejudge,
    "retrain": retrain,
    "dlq": dlq,
    "eval": evaluate,
    "tasks": tasks,
    "vm": vm,
    "staleness": staleness,
    "weights": weights,
}
