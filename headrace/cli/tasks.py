"""Commands about suites of tasks: import, make, certify, show, export."""

import argparse
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_config, group, integer, text_of
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cli.arguments import Commands
    from headrace.messages.judging import Certificate
    from headrace.messages.tasks import Oracle, Task
    from headrace.tasks import Suite
    from headrace.tasks.making.journal import Journal
    from headrace.tasks.packages.lab import Lab
    from headrace.vmhost.node.host import Host


def add(commands: "Commands") -> None:
    """Declare the commands of the group."""
    subcommands = group(commands, "tasks", "make, import and export task suites")
    for declare in (_add_make, _add_import, _add_certify, _add_export, _add_show):
        declare(subcommands)


FORMATS = ("swebench", "swesmith", "harbor", "jsonl", "verifiers")

SHOWN = 10

"""Number of refusals, and of notes, that are printed; the suite's import.json contains all of them."""


def _add_import(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("import", help="make a suite from tasks in another format")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="FILE.jsonl, the folder of Harbor tasks, or a taskset's name"
    )
    parser.add_argument("--name", default="", help="suite name; default: the source's name")
    parser.add_argument("--repos", type=Path, metavar="DIR", help="folder of checkouts, for rows that name a commit")
    parser.add_argument("--template", default="", help="run in this template instead of the task's image")
    parser.add_argument(
        "--system", type=Path, metavar="FILE", help="file with instructions to the agent, used for every task"
    )
    parser.add_argument("--tools", default="", metavar="A,B", help="tools that the tasks offer; default: all")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="GLOB", help="harbor: hand changes there to the verifier, too"
    )
    parser.add_argument("--python", type=Path, metavar="PATH", help="verifiers: the environment of the taskset")
    parser.add_argument("--taskset-config", default="", metavar="JSON", help="verifiers: the taskset's configuration")
    parser.add_argument("--count", type=integer(1), default=0, help="verifiers: the most tasks to read; default: all")
    add_config(parser)
    parser.set_defaults(handler=import_tasks)


def import_tasks(args: argparse.Namespace) -> int:
    """Import the tasks that are not imported yet; 1 when the suite has no task afterwards."""
    from headrace.tasks.importing import harbor, jsonl, swebench, swesmith, verifiers
    from headrace.tasks.importing.base import ImportOptions
    from headrace.tasks.importing.writing import REPORT, import_suite
    from headrace.tasks.verifiers.process import python_of

    modules = {"swebench": swebench, "swesmith": swesmith, "harbor": harbor, "jsonl": jsonl, "verifiers": verifiers}
    name = args.name or args.source.resolve().stem
    if "/" in name or name.startswith("."):
        raise RunError(f"expected a suite name without a slash, got {name!r}")
    if args.format != "verifiers" and (args.python or args.taskset_config or args.count):
        raise RunError(f"--python, --taskset-config and --count are for verifiers, not for {args.format}")
    if args.allow and (args.format != "harbor" or args.template):
        raise RunError("--allow is for harbor tasks in images, whose changes outside of the work folder it names")
    if wrong := next((glob for glob in args.allow if not glob.startswith("/")), ""):
        raise RunError(f"--allow: expected a pattern of absolute paths, such as '/etc/**', got {wrong!r}")
    options = ImportOptions(
        suite=name,
        source=args.source,
        repos=args.repos,
        template=args.template,
        system=text_of("--system", args.system).strip() if args.system else "",
        tools=tuple(tool for tool in args.tools.split(",") if tool),
        allow=tuple(args.allow),
        python=args.python,
        taskset_config=args.taskset_config,
        environment=args.settings.environment,
        count=args.count,
    )
    _check_tools(options.tools)
    folder = Path(args.settings.tasks.dir) / name
    report = import_suite(name, folder, f"{args.format} {args.source}", modules[args.format].read(options))
    for refusal in report.refused[:SHOWN]:
        say(f"refused {refusal.id}: {refusal.reason}")
    if len(report.refused) > SHOWN:
        say(f"{len(report.refused) - SHOWN} more were refused")
    for note, count in sorted(report.notes.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]:
        say(f"{count} of {report.tasks} tasks: {note}")
    if len(report.notes) > SHOWN:
        say(f"{len(report.notes) - SHOWN} more notes")
    trust = "; verdicts are read from logs alone, so training needs [tasks] at_risk" if report.trust == "log" else ""
    say(f"{report.tasks} tasks ({report.made} new), {len(report.refused)} refused in {folder} ({REPORT}){trust}")
    if args.format == "verifiers":
        say(f'a run on it needs [run.plugins] checkers = ["{python_of(args.python)}:{args.source}"]')
    return 0 if report.tasks else 1


def _check_tools(names: tuple[str, ...]) -> None:
    from headrace.harness.tools.registry import schemas_of
    from headrace.registry import PluginError, admit

    try:
        admit("tools", names)
        schemas_of(names)
    except PluginError as error:
        raise RunError(f"--tools: {error}") from None


def _add_make(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("make", help="make tasks: mutations of a package, or a repository's commits")
    parser.add_argument("kind", choices=("mutations", "commits"))
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="mutations: NAME==VERSION or a source tree; commits: a repository",
    )
    parser.add_argument(
        "--name",
        default="",
        help="suite name, whose interrupted call is continued; default: the name of the only source",
    )
    parser.add_argument("--count", type=integer(1), default=10, help="tasks of each source")
    parser.add_argument("--tries", type=integer(1), default=60, help="candidates of each source that are tried")
    parser.add_argument("--seed", type=int, default=1, help="seed that draws the mutations")
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
    candidates = _mutations if args.kind == "mutations" else _commits
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
    """The images of tasks, and those of the verifiers of them and of their steps."""
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
