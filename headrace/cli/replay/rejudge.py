"""`headrace rejudge`: judge the trajectories of a recorded run again, with the present rules or other rewards.

The new scores are published under the name of the new judge version; the run's trainer does not read them.
"""

import argparse
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_changes, add_plugins, add_run, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.judging.rubrics.judge import RubricJudge
    from headrace.judging.scoring import Rewarder
    from headrace.messages.judging import Score
    from headrace.messages.rollout import Trajectory
    from headrace.replay.rejudge import Verdicts
    from headrace.vmhost.node.host import Host


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("rejudge", help="judge a run's trajectories again, without effect on its trainer")
    add_run(parser, optional=False)
    parser.add_argument("--judge", required=True, metavar="VERSION", help="name of the new judge version")
    parser.add_argument(
        "--recorded", action="store_true", help="apply rules and rewards to the recorded test outcomes; run no tests"
    )
    parser.add_argument("--follow", action="store_true", help="print a line per group and follow an active run")
    parser.add_argument("--groups", type=integer(0), default=0, help="number of groups, from the first; 0 means all")
    add_changes(
        parser, "use another reward or rubric judge: algorithm.reward*, algorithm.length*, judge.rubric*, judge.model*"
    )
    add_plugins(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Judge the closed groups again; print one JSON line, and with --follow one per group."""
    from headrace.launch.session import looped

    return looped(rejudge(args))


async def rejudge(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace.config import load
    from headrace.judging.rubrics.client import EndpointFailed, EndpointRefused
    from headrace.judging.rubrics.rubric import RubricError
    from headrace.launch import runs
    from headrace.launch.guests import prepare_host
    from headrace.launch.session import bus_of
    from headrace.messages import subjects
    from headrace.replay import rejudge as rejudging
    from headrace.replay.recorded_run import ReplayError

    if subjects.token(args.judge) != args.judge:
        raise RunError(f"expected a judge version of lower case letters, digits, '-' and '_', got {args.judge!r}")
    folder = runs.find(args.run)
    config = with_rewards(load(folder.config), args.changes)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder, "judge"))
        host = None
        if not args.recorded:
            from headrace.vmhost.node.host import Host

            await prepare_host(config)
            host = await Host.open(config.environment, limits=config.sandboxes)
            stack.push_async_callback(host.close)
        rubrics = _rubrics(config) if any(entry.strip().startswith("judge.") for entry in args.changes) else None
        if rubrics is not None:
            stack.push_async_callback(rubrics.close)
        judge = verdicts(config, host, rubrics)
        try:
            if args.follow:
                async for group in rejudging.ending(bus, folder.id):
                    group_report = await rejudging.rejudge(bus, folder.id, args.judge, judge, [group])
                    say(msgspec.json.encode(group_report).decode())
            groups = await rejudging.closings(bus, folder.id)
            report = await rejudging.rejudge(bus, folder.id, args.judge, judge, groups[: args.groups or None])
        except (ReplayError, RubricError, EndpointFailed, EndpointRefused) as error:
            raise RunError(str(error), 1) from None
    say(msgspec.json.encode(report).decode())
    return 0


CHANGED = {"algorithm": ("length_", "reward", "todo_", "broken_call_"), "judge": ("rubric", "model")}
"""Section to the prefixes of the keys that `--with` accepts."""


def with_rewards(config: "Config", entries: list[str]) -> "Config":
    """The run's configuration with other rewards or another rubric judge. ConfigError, RunError."""
    from headrace.config import parse
    from headrace.launch.admission import changes

    # The keys of a rubric judge need one another, so the run's own are set beside the changes.
    own_keys = {name: getattr(config.judge, name) for name in config.judge.__struct_fields__}
    stored = [
        f"judge.{name}={msgspec.json.encode(value).decode()}"
        for name, value in own_keys.items()
        if name.startswith(CHANGED["judge"])
    ]
    changes(entries)
    parsed = parse("", "--with", [*stored, *entries])
    for entry in entries:
        section, _, key = entry.partition("=")[0].strip().partition(".")
        if not key.startswith(CHANGED.get(section, ("no key",))):
            raise RunError(
                f"{section}.{key} does not change a reward; expected algorithm.reward, .reward_options, .length_*, "
                ".todo_penalty or .broken_call_penalty, or a key of judge.rubric or judge.model"
            )
        changed = msgspec.structs.replace(getattr(config, section), **{key: getattr(getattr(parsed, section), key)})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def rewarder(config: "Config") -> "Rewarder":
    """The reward of a configuration. RunError when there is none of that name."""
    from headrace.judging.scoring import Rewarder
    from headrace.registry import PluginError

    try:
        return Rewarder.of(config)
    except PluginError as error:
        raise RunError(str(error)) from None


def _rubrics(config: "Config") -> "RubricJudge | None":
    """The rubric judge of a configuration. RunError when it cannot be used."""
    from headrace.judging.rubrics.client import EndpointRefused
    from headrace.judging.rubrics.judge import RubricError, RubricJudge

    try:
        return RubricJudge.of(config)
    except (RubricError, EndpointRefused) as error:
        raise RunError(str(error)) from None


def verdicts(config: "Config", host: "Host | None", rubrics: "RubricJudge | None" = None) -> "Verdicts":
    """A function that judges a trajectory with the rules of this version. Hidden tests run in a sandbox of `host`;
    without `host` it uses the recorded outcomes. Without `rubrics` it uses the rubric judge's recorded answers."""
    from headrace.judging.candidates import Candidate
    from headrace.judging.examination import Options, examine
    from headrace.judging.machines import HostMachines
    from headrace.judging.scoring import scored_again
    from headrace.judging.steps import suspicions
    from headrace.judging.verdicts import NoVerdict, conclude, recorded
    from headrace.messages.sandbox import SandboxLost
    from headrace.replay.recorded_run import ReplayError
    from headrace.tasks import UnknownSuite, open_suite

    reward = rewarder(config)
    machines = HostMachines(host) if host is not None else None

    async def report(kind: str, text: str = "", level: str = "info", /, **data: object) -> None:
        if level == "error":
            say(f"{kind}: {text}")

    async def judge(trajectory: "Trajectory", old: "Score") -> "Score":
        try:
            suite = open_suite(trajectory.task.suite, config.tasks.dir)
            task, oracle = suite.task(trajectory.task.task), suite.oracle(trajectory.task.task)
        except UnknownSuite as error:
            raise ReplayError(str(error)) from None
        candidate = Candidate(trajectory=trajectory, task=task, oracle=oracle)
        if machines is None:
            matched = suspicions(candidate, old.steps or ())
            verdict = conclude(oracle, recorded(old, oracle), matched)
        else:
            # A machine of its own, so that a crash can only come from this candidate. No request of the run has this
            # name.
            alone = msgspec.structs.replace(
                trajectory, run="rejudge", group=trajectory.id, isolation="episode", lane="eval"
            )
            try:
                verdict = await examine(
                    Candidate(trajectory=alone, task=task, oracle=oracle), machines, report, Options()
                )
            except (SandboxLost, NoVerdict) as error:
                raise ReplayError(f"trajectory {trajectory.id} could not be judged: {error}") from None
        rubric = old.rubric if rubrics is None else await rubrics.judge(candidate)
        verdict = msgspec.structs.replace(verdict, rubric=None if verdict.reason else rubric)
        try:
            value = await reward.reward(trajectory, verdict)
        except NoVerdict as error:
            raise ReplayError(str(error)) from None
        return scored_again(old, trajectory, verdict, value, reward)

    return judge
