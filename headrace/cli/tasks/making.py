"""`headrace tasks make`: mutations of a package, its deleted features, a repository's commits."""

import argparse
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_config, integer
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.messages.tasks import Oracle, Task
    from headrace.tasks.making.journal import Journal
    from headrace.tasks.packages.lab import Lab
    from headrace.vmhost.node.host import Host


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("make", help="make tasks from a package's or a repository's code and tests")
    parser.add_argument("kind", choices=("mutations", "features", "commits"))
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="mutations and features: NAME==VERSION or a source tree; commits: a repository",
    )
    parser.add_argument(
        "--name",
        default="",
        help="suite name, whose interrupted call is continued; default: the name of the only source",
    )
    parser.add_argument("--count", type=integer(1), default=10, help="tasks of each source")
    parser.add_argument("--tries", type=integer(1), default=60, help="candidates of each source that are tried")
    parser.add_argument("--seed", type=int, default=1, help="seed that draws the mutations or features")
    parser.add_argument(
        "--changed-tests",
        action="store_true",
        help="commits: run only the test files that a commit adds or changes, for repositories with long test runs",
    )
    parser.add_argument(
        "--only-tests",
        action="append",
        default=[],
        metavar="GLOB",
        help="commits: with --changed-tests, only test files that match decide, such as 'tests/parsing/*'; repeatable",
    )
    parser.add_argument(
        "--bare-prompt",
        action="store_true",
        help="commits: the prompt is the message alone, with nothing before it",
    )
    add_config(parser)
    parser.set_defaults(handler=make)


def make(args: argparse.Namespace) -> int:
    """Make the suite; 1 when no candidate makes a certified task."""
    from headrace.launch.session import looped

    if not args.name and len(args.sources) > 1:
        raise RunError(f"expected --name: the suite of {len(args.sources)} sources")
    args.name = args.name or _named(args.sources[0])
    if "/" in args.name or args.name.startswith("."):
        raise RunError(f"expected a suite name without a slash, got {args.name!r}")
    if args.only_tests and not (args.kind == "commits" and args.changed_tests):
        raise RunError("--only-tests needs `make commits` with --changed-tests: otherwise all tests decide")
    return looped(_build(args))


def _named(source: str) -> str:
    """The suite's default name: of the folder, or ``NAME-VERSION``."""
    return Path(source).resolve().name if Path(source).is_dir() else source.replace("==", "-")


async def _build(args: argparse.Namespace) -> int:
    """Make tasks of one source after another."""
    from headrace.launch.guests import prepare_host
    from headrace.tasks.making.journal import Journal
    from headrace.vmhost.node.host import Host

    config = args.settings
    journal = Journal(args.name, Path(config.tasks.dir))
    await prepare_host(config)
    host = await Host.open(config.environment, limits=config.sandboxes)
    try:
        for source in args.sources:
            if journal.tasks(source) < args.count:
                await _source(args, source, journal, host)
            journal.finish(f"{args.kind} of {', '.join(args.sources)}")
    finally:
        await host.close()
    made = sum(journal.tasks(source) for source in args.sources)
    # The processor time is left out: os.times misses what the warm process of a backend forks (most of it).
    say(f"{made} certified tasks of {len(args.sources)} sources in {config.tasks.dir}/{args.name}")
    return 0 if made else 1


Attempt = Callable[[], Coroutine[Any, Any, tuple["Task", "Oracle"]]]


async def _source(args: argparse.Namespace, source: str, journal: "Journal", host: "Host") -> None:
    """The tasks of one package or repository."""
    from headrace.tasks.making.journal import NoTask
    from headrace.tasks.packages.fetch import PackageError
    from headrace.tasks.packages.lab import Lab, SuiteError

    lab = Lab(host, f"make-{args.name}", "debian")
    tried = 0
    candidates = {"mutations": _mutations, "features": _features, "commits": _commits}[args.kind]
    try:
        async for id, attempt in candidates(lab, source, args):
            if journal.tasks(source) >= args.count or tried >= args.tries:
                break
            tried += 1
            if id in journal.lines:
                continue
            try:
                task, oracle = await attempt()
                await _certify(task, oracle, source, journal, host)
            except NoTask as error:
                journal.refuse(id, source, str(error))
                say(f"{id}: no task: {error}")
    except (PackageError, SuiteError, NoTask) as error:
        complain(f"{source}: {error}")


async def _mutations(lab: "Lab", source: str, args: argparse.Namespace) -> "AsyncIterator[tuple[str, Attempt]]":
    """The candidates of a package, after its unchanged tests have run."""
    from headrace.tasks.packages import attempts, sdist

    package = await sdist.source_tree(source, "")
    package, exam = await sdist.examined(lab, package, say)
    for mutation in attempts.candidates(package, args.seed):

        async def attempt(mutation: Any = mutation) -> "tuple[Task, Oracle]":
            return await attempts.attempt(lab, package, mutation, exam, args.name, args.seed)

        yield attempts.id_of(package, mutation), attempt


async def _features(lab: "Lab", source: str, args: argparse.Namespace) -> "AsyncIterator[tuple[str, Attempt]]":
    """The candidates of a package, after its unchanged tests have run."""
    from headrace.tasks.making import features
    from headrace.tasks.packages import sdist

    package = await sdist.source_tree(source, "")
    package, exam = await sdist.examined(lab, package, say)
    for feature in features.candidates(package, args.seed):

        async def attempt(feature: Any = feature) -> "tuple[Task, Oracle]":
            return await features.attempt(lab, package, feature, exam, args.name)

        yield features.id_of(package, feature), attempt


async def _commits(lab: "Lab", source: str, args: argparse.Namespace) -> "AsyncIterator[tuple[str, Attempt]]":
    """The candidates of a repository."""
    from headrace.tasks.making import commits

    name = Path(source).resolve().name
    for commit in commits.commits(Path(source), args.only_tests):

        async def attempt(commit: commits.Commit = commit) -> "tuple[Task, Oracle]":
            return await commits.attempt(
                lab, Path(source), commit, args.name, say, args.changed_tests, args.bare_prompt
            )

        yield commits.id_of(name, commit), attempt


async def _certify(task: "Task", oracle: "Oracle", source: str, journal: "Journal", host: "Host") -> None:
    """Examine the task like `headrace tasks certify`; NoTask if it is not certified."""
    from headrace.judging import HostMachines
    from headrace.judging.certifying import certify
    from headrace.tasks.making.journal import NoTask, Single

    async def event(kind: str, text: str = "", level: Any = "info", /, **_: Any) -> None:
        if level == "error":
            complain(f"{kind}: {text}")

    made = await certify(Single(task, oracle), task.ref.task, HostMachines(host), event, backend=host.backend)
    if made.verdict != "certified":
        raise NoTask(f"{made.verdict}: {'; '.join(made.reasons)}")
    journal.keep(source, task, oracle, made)
    named = len(oracle.expected)
    say(f"{task.ref.task}: {named} tests must pass, its tests reject {made.killed} of {made.mutants} mutants")
