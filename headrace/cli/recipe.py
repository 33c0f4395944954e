"""Commands before the first run: one writes its configuration, one tries it on this machine."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config_file, add_set, integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

HEAD = """headrace init {out} {words}
Written from the model, the suite and the hardware named above; every value has its reason. Change what you like, then
`headrace check`. Tasks of which 1 to 7 of 8 attempts pass teach most."""


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("init", help="write a run for GPUs, each value with its reason")
    parser.add_argument("out", metavar="RUN.toml", help="the file to write; an existing one is refused")
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder to train")
    parser.add_argument("--tasks", required=True, metavar="SUITE", help="suite to train on")
    parser.add_argument("--gpus", required=True, metavar="NxGIB", help="GPUs of a node and their memory, such as 8x80")
    parser.add_argument("--nodes", type=integer(1), default=1, metavar="N", help="number of nodes; default: 1")
    parser.add_argument("--engine", default="", help="embedded or sglang; default: sglang on more than one GPU")
    parser.add_argument("--context", type=integer(1), default=0, metavar="TOKENS", help="default: 32768")
    parser.add_argument("--agent", default="headrace", help="the agent that works on the tasks; default: headrace")
    parser.add_argument("--tasks-dir", default="suites", metavar="DIR", help="folder of suites; default: suites")
    add_set(parser)
    parser.set_defaults(handler=init)
    _add_try(commands)


def init(args: argparse.Namespace) -> int:
    """Write the file, and print its path and the division of the GPUs."""
    from headrace.config import parse
    from headrace.launch.output import say
    from headrace.recipes import choosing, wanted, writing

    count, gib = wanted.gpus_of(args.gpus)
    asked = wanted.Wanted(
        args.model, args.tasks, count, gib, args.nodes, args.engine, args.context, tasks_dir=args.tasks_dir
    )
    wanted.refuse(asked, args.agent)
    parse("", "--set", args.set)  # keys and types, before the plan
    given = {value.key: value for value in choosing.given_by(args.set)}
    chosen = choosing.choose(asked, {key: value.value for key, value in given.items()})
    values = {value.key: value for value in chosen} | given
    text = writing.toml(list(values.values()), HEAD.format(out=args.out, words=_words(args)))
    parse(text, args.out)  # refuses what breaks a rule between keys
    try:
        with Path(args.out).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise wanted.InitError(f"{args.out} exists; name another file, or remove it") from None
    say(f"{args.out}: {len(values)} keys")
    return 0


def _words(args: argparse.Namespace) -> str:
    """The options that were given, as the command line has them."""
    words = [f"--model {args.model}", f"--tasks {args.tasks}", f"--gpus {args.gpus}"]
    words += [f"--nodes {args.nodes}"] if args.nodes > 1 else []
    words += [f"--engine {args.engine}"] if args.engine else []
    words += [f"--context {args.context}"] if args.context else []
    words += [f"--tasks-dir {args.tasks_dir}"] if args.tasks_dir != "suites" else []
    return " ".join([*words, *(f"--set {entry}" for entry in args.set)])


def _add_try(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("try", help="check, then sample, train and swap once with the run's own model")
    add_config_file(parser, "configuration of the run")
    parser.set_defaults(handler=attempt)


async def attempt(args: argparse.Namespace) -> int:
    """Print a line per part with its seconds; 1 when a part does not work, or `headrace check` finds a problem."""
    from headrace.launch.checks import host
    from headrace.launch.output import complain, say
    from headrace.trial.trial import Part, Trial, TrialFailed

    config = args.settings
    problems = [finding async for finding in host.check(config) if not finding.good]
    for finding in problems:
        say(f"BAD  {finding.part}: {finding.text}")
    if problems:
        return 1

    def tell(part: Part) -> None:
        say(f"ok   {part.seconds:7.1f} s  {part.name}: {part.text}")

    root = Path(config.run.dir)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="try-", dir=root) as folder:  # the disk that the run will use
        try:
            await Trial(config, Path(folder), tell).run()
        except TrialFailed as error:
            complain(str(error))
            return 1
    return 0
