"""`headrace tasks import`: makes a suite from tasks in another format."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer, text_of
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


FORMATS = ("swebench", "swesmith", "harbor", "jsonl", "verifiers")

SHOWN = 10

"""Number of refusals, and of notes, that are printed; the suite's import.json contains all of them."""


def add(commands: "Commands") -> None:
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
