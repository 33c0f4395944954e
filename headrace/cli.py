"""The command line. Heavy imports happen after the arguments are parsed, so that `--help` answers at once.

Exit codes: 0 done; 1 a check said no (audit, replay, verify); 2 bad arguments or configuration; 3 this machine can't do
it (no qemu, no memory, no disk); 4 the broker or a port; 5 another run is active here; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

ACTORS = (
    "curriculum",
    "evaluator",
    "dead_letter",
    "gateway",
    "feedback",
    "scavenger",
    "environment",
    "judge",
    "rollout",
    "trainer",
    "weight_sender",
    "weight_receiver",
)


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = argparse.ArgumentParser(
        prog="headrace", description="Reinforcement learning for coding agents, as actors on a NATS message bus."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a whole run on this machine and see it through")
    up.add_argument("config", help="a TOML such as deploy/demo.toml")
    up.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")

    chaos = commands.add_parser("chaos", help="a run like that of `up`, while actors, machines and the broker die")
    chaos.add_argument("config", help="a TOML such as deploy/demo.toml")
    chaos.add_argument("--kills", type=int, default=200, help="how many; the run is made longer where it needs to be")
    chaos.add_argument("--seed", type=int, default=1, help="draws who dies when, and how")
    chaos.add_argument("--minutes", type=float, default=60.0, help="the longest that it may take")
    chaos.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")

    actor = commands.add_parser("actor", help="start one actor (or several, comma-separated) on this node")
    actor.add_argument("names", metavar="NAME[,NAME...]", help=", ".join(ACTORS) + "; NAME:ID gives an id")
    actor.add_argument("--config", required=True)
    actor.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=argparse.SUPPRESS)
    actor.add_argument("--run", default="", help="run id; default: [run] id of the configuration")
    actor.add_argument("--url", default="", help="broker; default: [bus] url of the configuration")
    actor.add_argument("--credentials", default="", help="folder of per-role credentials")

    status = commands.add_parser("status", help="who is alive, and how far a run is")
    status.add_argument("run", nargs="?", default="latest", help="run id, path or 'latest'")

    audit = commands.add_parser("audit", help="prove from the streams alone that nothing was lost, doubled or stale")
    audit.add_argument("run", nargs="?", default="latest", help="run id, path or 'latest'")

    staleness = commands.add_parser("staleness", help="a run's staleness bound; change it while the run goes on")
    staleness.add_argument("run", help="run id, path or 'latest'")
    staleness.add_argument("bound", nargs="?", type=int, help="versions that a token may be old; shown when left out")

    replay = commands.add_parser("replay", help="run a step or a trajectory of the past again and compare")
    replay.add_argument("run", help="run id, path or 'latest'; or the folder of a bundle")
    replay.add_argument("--step", type=int, help="one step, bit for bit")
    replay.add_argument("--steps", type=int, metavar="COUNT", help="so many steps, drawn at random by --seed")
    replay.add_argument("--seed", type=int, default=1)
    replay.add_argument("--trajectory", metavar="ID", help="the tool calls of a trajectory, in a fresh sandbox")
    replay.add_argument("--debug", action="store_true", help="stop in front of the backward pass, under pdb")
    replay.add_argument("--to", default="", metavar="DIR", help="write a bundle that replays without broker and run")
    replay.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="take the step with another objective, and say what that changes",
    )

    rejudge = commands.add_parser("rejudge", help="judge a run's trajectories again, where no trainer sees it")
    rejudge.add_argument("run", help="run id, path or 'latest'")
    rejudge.add_argument("--judge", required=True, metavar="VERSION", help="name of the new judge version")
    rejudge.add_argument("--recorded", action="store_true", help="new rules and rewards on the recorded test outcomes")
    rejudge.add_argument("--follow", action="store_true", help="a line per group, and on behind a run that lives")
    rejudge.add_argument("--groups", type=int, default=0, help="how many, from the first; 0 means all")
    rejudge.add_argument(
        "--with", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help="other rewards"
    )

    retrain = commands.add_parser("retrain", help="a second trainer on a run's recorded batches")
    retrain.add_argument("run", help="run id, path or 'latest'")
    retrain.add_argument("--to", required=True, metavar="DIR", help="its folder; it goes on where it was left")
    retrain.add_argument(
        "--with", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help="another objective"
    )
    retrain.add_argument("--judge", default="", metavar="VERSION", help="learn from the scores of `rejudge`")
    retrain.add_argument("--steps", type=int, default=0, help="how many; 0 means all")
    retrain.add_argument("--follow", action="store_true", help="go on behind a run that lives")

    dlq = commands.add_parser("dlq", help="messages that nobody could handle")
    dlq_commands = dlq.add_subparsers(dest="dlq_command", required=True, metavar="COMMAND")
    listing = dlq_commands.add_parser("list", help="a line per letter")
    listing.add_argument("run", nargs="?", default="latest", help="run id, path or 'latest'")
    listing.add_argument("--all", action="store_true", help="also settled ones, and those of other runs")
    letter = dlq_commands.add_parser("show", help="everything about one letter, as JSON")
    letter.add_argument("run", help="run id, path or 'latest'")
    letter.add_argument("letter", help="number, or STREAM/CONSUMER/SEQUENCE")
    for name, text in (("retry", "send messages again, to a run that lives"), ("drop", "settle letters by hand")):
        one = dlq_commands.add_parser(name, help=text)
        one.add_argument("run", help="run id, path or 'latest'")
        one.add_argument("letter", nargs="+", help="number, or STREAM/CONSUMER/SEQUENCE")
        one.add_argument("--note", default="", help="why, kept beside the letter")

    evaluate = commands.add_parser("eval", help="measure a policy on a suite; one JSON line")
    evaluate.add_argument("--policy", required=True, help="scripted:oracle|idle|edit-tests, or RUN[:VERSION]")
    evaluate.add_argument("--suite", required=True)
    evaluate.add_argument("--tasks", type=int, default=0, help="how many, from the first; 0 means all")
    evaluate.add_argument("--config", default="", help="a TOML for environment and limits")
    evaluate.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    evaluate.add_argument("--temperature", type=float, default=1.0)

    commands.add_parser("subjects", help="the table of subjects and streams")

    tasks = commands.add_parser("tasks", help="make task suites from real packages")
    task_commands = tasks.add_subparsers(dest="tasks_command", required=True, metavar="COMMAND")
    sdist = task_commands.add_parser("from-sdist", help="mutations of a real package that its own tests catch")
    sdist.add_argument("package", nargs="?", default="", metavar="NAME==VERSION")
    sdist.add_argument("--path", default="", help="a source tree instead of a package")
    sdist.add_argument("--test-command", default="", help="how its tests run; default: python3 -m pytest")
    sdist.add_argument("--count", type=int, default=20)
    sdist.add_argument("--seed", type=int, default=1)
    sdist.add_argument("--name", default="", help="suite name; default: the package's")
    sdist.add_argument("--config", default="")
    sdist.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    show = task_commands.add_parser("show", help="one task as the agent sees it")
    show.add_argument("suite")
    show.add_argument("task")
    show.add_argument("--config", default="")

    vm = commands.add_parser("vm", help="guest images and sandboxes of this host")
    vm_commands = vm.add_subparsers(dest="vm_command", required=True, metavar="COMMAND")
    from headrace.launch.vm_arguments import arguments as vm_arguments

    vm_arguments(vm_commands)

    weights = commands.add_parser("weights", help="the chain of published versions")
    chain_commands = weights.add_subparsers(dest="weights_command", required=True, metavar="COMMAND")
    for name, text in (
        ("log", "a line per version"),
        ("show", "one version in full"),
        ("verify", "hash the whole chain again from the stream, or with --version that one"),
        ("fold", "the last deltas as one, for who lags"),
        ("export", "a version as a safetensors file"),
        ("diff", "what two versions differ in"),
        ("collect", "remove what no joiner can need any more"),
        ("regions", "which replica runs which version since when"),
    ):
        one = chain_commands.add_parser(name, help=text)
        if name == "diff":
            one.add_argument("older", type=int)
            one.add_argument("newer", type=int)
        if name == "export":
            one.add_argument("path", help="the file to write")
        one.add_argument("run", nargs="?", default="latest", help="run id, path or 'latest'")
        if name in ("show", "verify", "export"):
            one.add_argument("--version", type=int, default=-1, help="which version; default: the newest")
        if name == "fold":
            one.add_argument("--count", type=int, default=8, help="how many deltas")
        if name == "collect":
            one.add_argument("--chains", type=int, default=3, help="newest chains that stay, at least 2")
        if name == "regions":
            one.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
        one.add_argument("--unsigned", action="store_true", help="take versions that nobody signed")
    return top


def _open_streams() -> None:
    """Started with a standard stream closed, the next descriptor would take its number, and libuv ends the process."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what goes wrong is one sentence on standard error and an exit code."""
    _open_streams()
    args = parser().parse_args(argv)
    if args.command == "subjects":
        from headrace.messages import subjects

        print(subjects.table(), end="")
        return 0
    try:
        from headrace.launch import commands

        return commands.run(args)
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
