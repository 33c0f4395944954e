"""Commands about suites of tasks: certify, probe, show, export; making.py and importing.py have the others."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_config, add_config_file, group, integer
from headrace.cli.tasks import importing, making
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cli.arguments import Commands
    from headrace.messages.judging import Certificate
    from headrace.tasks import Suite
    from headrace.vmhost.node.host import Host


def add(commands: "Commands") -> None:
    """Declare the commands of the group."""
    subcommands = group(commands, "tasks", "make, import and export task suites")
    for declare in (making.add, importing.add, _add_certify, _add_probe, _add_export, _add_show):
        declare(subcommands)


def _add_certify(commands: "Commands") -> None:
    """Declare the commands."""
    parser = commands.add_parser("certify", help="examine the tests of a suite before a policy trains on it")
    parser.add_argument("suite", help="name of the suite")
    parser.add_argument(
        "--out", default="", metavar="DIR", help="folder of the file; default: certificates/ of [tasks] dir"
    )
    parser.add_argument(
        "--bundled", action="store_true", help="of a generated suite: write the certificates that the package ships"
    )
    parser.add_argument(
        "--parallel", type=integer(1), default=2, help="number of tasks that are examined at once; default: 2"
    )
    add_config(parser)
    parser.set_defaults(handler=certify)


def certify(args: argparse.Namespace) -> int:
    """Certify every task; 1 if a task is not certified."""
    from headrace.launch.session import looped

    return looped(examine(args))


async def examine(args: argparse.Namespace) -> int:
    """Examine the suite in sandboxes of this machine and write its file."""
    import asyncio
    from textwrap import indent

    from headrace.judging import rules
    from headrace.judging.certifying import certify as certificate_of
    from headrace.judging.machines import HostMachines
    from headrace.launch import admission
    from headrace.launch.guests import prepare_host
    from headrace.messages.judging import Certificate
    from headrace.messages.sandbox import NoCapacity, SandboxLost
    from headrace.messages.tasks import TaskRef
    from headrace.registry import PluginError
    from headrace.tasks import UnknownSuite, open_suite
    from headrace.tasks.base import both_sides
    from headrace.tasks.certificates import BUNDLED, append, begun, sample_of, source_of, task_hash, write
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.node.host import Host

    config = args.settings
    suite = open_suite(admission.suite(args.suite), config.tasks.dir)
    ids = list(sample_of(suite))
    if args.bundled and (args.out or not source_of(suite)):
        raise RunError("--bundled expects a generated suite and no --out: it writes the certificates into the package")
    await prepare_host(config)
    host = await Host.open(config.environment, limits=config.sandboxes)
    free = asyncio.Semaphore(args.parallel)
    folder = BUNDLED if args.bundled else Path(args.out) if args.out else Path(config.tasks.dir) / "certificates"
    unfinished = begun(suite.name, folder)

    async def one(id: str) -> "Certificate":
        hash = ""
        async with free:
            try:
                hash = task_hash(*both_sides(suite, id))
                earlier = unfinished.get(hash)
                conditions = (rules.VERSION, host.backend, ())  # a plugin may have changed
                if earlier is not None and (earlier.judge_version, earlier.backend, earlier.plugins) == conditions:
                    return earlier
                demand_images(suite, id, host)
                made = await certificate_of(suite, id, HostMachines(host), event, backend=host.backend)
                append(suite.name, made, folder)
            except (UnknownSuite, PluginError, VmhostError, SandboxLost, NoCapacity) as error:
                # Of this task alone. It is not noted as examined: the cause may be gone at the next try.
                made = Certificate(
                    task=TaskRef(suite.name, id),
                    task_hash=hash,
                    judge_version=rules.VERSION,
                    backend=host.backend,
                    verdict="refused",
                    reasons=(f"the task cannot run here: {error}",),
                )
            say(line(made))
            if made.output:
                say(indent(made.output, "    | "))
            return made

    async def event(kind: str, text: str = "", level: Any = "info", /, **_: Any) -> None:
        if level == "error":
            complain(f"{kind}: {text}")

    try:
        made = await asyncio.gather(*(one(id) for id in ids))
    finally:
        await host.close()
    path = write(suite, made, folder)
    say(f"{summary(made)}; written to {path}")
    return 0 if all(certificate.verdict == "certified" for certificate in made) else 1


def demand_images(suite: "Suite", id: str, host: "Host") -> None:
    """VmhostError when this machine cannot run the images of a task. An outside backend may hold images elsewhere."""
    from headrace.vmhost.errors import VmhostError

    images = images_of(suite, [id])
    if not images or host.plugins:
        return
    host.demand("upper_diff")
    if absent := sorted(images - host.held()):
        raise VmhostError(
            f"the image {absent[0]} is not stored on this machine; store it with `headrace images SOURCE`"
        )


def images_of(suite: "Suite", ids: "Sequence[str]") -> set[str]:
    """The images of tasks, of their verifiers and of the verifiers of their steps."""
    images = {suite.task(id).image for id in ids}
    for oracle in map(suite.oracle, ids):
        verifiers = [oracle.verifier, *(step.verifier for step in (oracle.steps.tests if oracle.steps else ()))]
        images |= {verifier.image for verifier in verifiers if verifier}
    return images - {""}


def line(made: "Certificate") -> str:
    """One certificate in one line."""
    told = "; ".join((*made.reasons, *(f"at risk: {risk}" for risk in made.risks or ()), *made.notes))
    why = f": {told}" if told else ""
    killed = f"{made.killed}/{made.mutants} mutants" if made.gold_runs else "not examined"
    return f"{made.task.task} {made.verdict} ({made.gold_passed}/{made.gold_runs} gold, {killed}){why}"


def summary(made: "list[Certificate] | tuple[Certificate, ...]") -> str:
    """All certificates of a suite in one line."""
    good = sum(certificate.verdict == "certified" for certificate in made)
    mutants = sum(certificate.mutants for certificate in made)
    passing = mutants - sum(certificate.killed for certificate in made)
    share = f", {passing} of {mutants} mutants pass ({passing / mutants:.1%})" if mutants else ""
    return f"{good} of {len(made)} tasks are certified{share}"


def _add_probe(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("probe", help="select the tasks of [tasks] suite that a policy solves sometimes")
    add_config_file(parser, "configuration of the run that is to train on them")
    parser.add_argument("--attempts", type=integer(1), default=8, help="attempts at each task; default: 8")
    parser.add_argument("--low", type=integer(0), default=1, help="least attempts that pass; default: 1")
    parser.add_argument("--high", type=integer(0), help="most attempts that pass; default: --attempts less 1")
    parser.add_argument("--tasks", type=integer(0), default=0, help="number of tasks, from the first; 0 means all")
    parser.add_argument(
        "--policy", default="", help="in the form of `headrace eval`; default: the policy with which the run begins"
    )
    parser.add_argument("--out", default="", metavar="NAME", help="name of the new suite; default: the suite's, -band")
    parser.set_defaults(handler=probe)


async def probe(args: argparse.Namespace) -> int:
    """Sample and select; 1 when no task is kept. The same command continues one that was killed."""
    from headrace.launch.measuring import probe

    band = probe.Band(attempts=args.attempts, low=args.low, high=args.attempts - 1 if args.high is None else args.high)
    name = args.out or args.settings.tasks.suite.replace("/", "-") + "-band"
    return await probe.probe(args.settings, name, band, args.policy, args.tasks)


def _add_show(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("show", help="print a task as the agent sees it, or the certificates of a suite")
    parser.add_argument("suite")
    parser.add_argument("task", nargs="?", default="", help="default: a line for the certificate of every task")
    parser.add_argument("--certificate", action="store_true", help="print the whole certificate instead, as JSON")
    add_config(parser)
    parser.set_defaults(handler=show)


def show(args: argparse.Namespace) -> int:
    """Print prompt and files of the task, or certificates. Hidden tests are never shown."""
    from headrace.launch import admission
    from headrace.tasks import open_suite
    from headrace.tasks.base import both_sides

    if args.certificate or not args.task:
        return certificates(args)
    task, _ = both_sides(open_suite(admission.suite(args.suite), args.settings.tasks.dir), args.task)
    say(f"{task.ref.suite} {task.ref.task} ({task.family})\n{task.prompt}\n")
    for path, data in sorted(task.files.items()):
        if len(task.files) < 20:
            say(f"--- {path}\n{data.decode('utf-8', 'replace')}")
        else:
            say(f"{len(data):8} {path}")
    return 0


def certificates(args: argparse.Namespace) -> int:
    """Print the certificates of a suite, or one whole certificate as JSON."""
    import msgspec

    from headrace.tasks.certificates import read

    config = args.settings
    try:
        made = read(args.suite, config.tasks.dir)
    except ValueError as error:
        raise RunError(str(error)) from None
    if made is None:
        raise RunError(
            f"there are no certificates of {args.suite}; make them with `headrace tasks certify {args.suite}`"
        )
    if not args.task:
        for certificate in made.certificates:
            say(line(certificate))
        say(summary(made.certificates))
        return 0
    chosen = next((each for each in made.certificates if each.task.task == args.task), None)
    if chosen is None:
        raise RunError(
            f"{args.suite} has no certificate of {args.task!r}; `headrace tasks show {args.suite}` lists them"
        )
    say(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    return 0


def _add_export(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("export", help="write tasks of a suite as Harbor folders")
    parser.add_argument("suite")
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder to write; must be new or empty")
    parser.add_argument("--tasks", type=integer(1), default=100, help="number of tasks, from the first")
    parser.add_argument("--organisation", default="headrace", help="first part of every task's name; default: headrace")
    add_config(parser)
    parser.set_defaults(handler=export)


def export(args: argparse.Namespace) -> int:
    """Write the folders; 1 when no task could be written."""
    from headrace.launch import admission
    from headrace.tasks import open_suite
    from headrace.tasks.exporting.harbor import export

    if args.dir.exists() and any(args.dir.iterdir()):
        raise RunError(f"{args.dir} is not empty; name a new folder")
    suite = open_suite(admission.suite(args.suite), args.settings.tasks.dir)
    done = export(suite, suite.ids()[: args.tasks], args.dir, args.organisation)
    for id, reason in list(done.refused.items())[:10]:
        say(f"refused {id}: {reason}")
    say(f"{done.tasks} tasks in {args.dir}, {len(done.refused)} refused")
    return 0 if done.tasks else 1
