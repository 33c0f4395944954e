"""Commands that run the records of a run again: a step, a trajectory's calls, the judge, the training.

`replay` prints one JSON line (one per step with `--steps`), in which NaN and infinity are null; its exit code is 0 only
if the results are equal. `rejudge` publishes its scores under the name of the new judge version; the run's trainer does
not read them.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_changes, add_plugins, add_run, integer
from headrace.launch import runs
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.judging.rubrics.judge import RubricJudge
    from headrace.messages.judging import Score
    from headrace.messages.rollout import Trajectory
    from headrace.messages.training import StepManifest
    from headrace.replay.recorded_run import RecordedRun
    from headrace.replay.rejudge import Verdicts
    from headrace.replay.step import Rerun
    from headrace.vmhost.node.host import Host


def add(commands: "Commands") -> None:
    """Declare the commands."""
    for declare in (_add_replay, _add_rejudge, _add_retrain):
        declare(commands)


MODES = ("--step", "--steps", "--trajectory")


def _add_replay(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("replay", help="run a recorded step or trajectory again and compare")
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
    from headrace.launch.session import looped

    _check(args)
    changes(args.changes)
    if args.trajectory is not None:
        return looped(_trajectory(args))
    if args.steps is not None:
        return looped(_steps(args))
    if args.debug:
        return _debug(args)
    return looped(_step(args))


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
    from headrace.cli import tool_calls
    from headrace.config import load
    from headrace.launch.session import bus_of

    folder = runs.find(args.run)
    config = load(folder.config)
    async with bus_of(folder, "replay") as bus:
        trajectory = await tool_calls.find(bus, folder.id, args.trajectory)
    line = await tool_calls.replay_calls(config, folder.path, trajectory)
    _say(line)
    return 0 if line.equal else 1


def _add_rejudge(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("rejudge", help="judge a run's trajectories again, beside its trainer")
    add_run(parser, optional=False)
    parser.add_argument("--judge", required=True, metavar="VERSION", help="name of the new judge version")
    parser.add_argument(
        "--recorded", action="store_true", help="apply rules and rewards to the recorded test outcomes; run no tests"
    )
    parser.add_argument("--follow", action="store_true", help="print a line per group and follow an active run")
    parser.add_argument("--groups", type=integer(0), default=0, help="number of groups, from the first; 0 means all")
    add_changes(
        parser,
        "use another reward or rubric judge: algorithm.reward, algorithm.options.reward.*, judge.rubric*, .model*",
    )
    add_plugins(parser)
    parser.set_defaults(handler=rejudge)


async def rejudge(args: argparse.Namespace) -> int:
    """Judge the closed groups again; print one JSON line, and with --follow one per group."""
    from headrace.config import load
    from headrace.judging.rubrics.judge import RubricJudge
    from headrace.launch.guests import prepare_host
    from headrace.launch.session import bus_of
    from headrace.messages import subjects
    from headrace.replay import rejudge as rejudging

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
        rubrics = RubricJudge.of(config) if any(entry.strip().startswith("judge.") for entry in args.changes) else None
        if rubrics is not None:
            stack.push_async_callback(rubrics.close)
        judge = verdicts(config, host, rubrics)
        if args.follow:
            async for group in rejudging.ending(bus, folder.id):
                group_report = await rejudging.rejudge(bus, folder.id, args.judge, judge, [group])
                say(msgspec.json.encode(group_report).decode())
        groups = await rejudging.closings(bus, folder.id)
        report = await rejudging.rejudge(bus, folder.id, args.judge, judge, groups[: args.groups or None])
    say(msgspec.json.encode(report).decode())
    return 0


CHANGED = {"algorithm": ("reward", "options.reward."), "judge": ("rubric", "model")}

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
    named = [entry.partition("=")[0].strip() for entry in entries]
    if "algorithm.reward" not in named:  # another reward has other options
        for name, value in config.algorithm.options.reward.items():
            stored.append(f"algorithm.options.reward.{name}={msgspec.json.encode(value).decode()}")
    changes(entries)
    parsed = parse("", "--with", [*stored, *entries])
    options = msgspec.structs.replace(config.algorithm.options, reward=parsed.algorithm.options.reward)
    config = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, options=options))
    for path in named:
        section, _, key = path.partition(".")
        if not key.startswith(CHANGED.get(section, ("no key",))):
            raise RunError(
                f"{section}.{key} does not change a reward; expected algorithm.reward or .options.reward, or a key of "
                "judge.rubric or judge.model"
            )
        if key.startswith("options."):
            continue
        changed = msgspec.structs.replace(getattr(config, section), **{key: getattr(getattr(parsed, section), key)})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def verdicts(config: "Config", host: "Host | None", rubrics: "RubricJudge | None" = None) -> "Verdicts":
    """A function that judges a trajectory with the rules of this version. Hidden tests run in a sandbox of `host`;
    without `host` it uses the recorded outcomes. Without `rubrics` it uses the rubric judge's recorded answers."""
    from headrace.judging.candidates import Candidate
    from headrace.judging.examination import Options, examine
    from headrace.judging.machines import HostMachines
    from headrace.judging.scoring import Rewarder, scored_again
    from headrace.judging.steps import suspicions
    from headrace.judging.verdicts import NoVerdict, conclude, recorded
    from headrace.messages.sandbox import SandboxLost
    from headrace.replay.recorded_run import ReplayError
    from headrace.tasks import UnknownSuite, open_suite

    reward = Rewarder.of(config)
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


def _add_retrain(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("retrain", help="train a second policy on a run's recorded batches")
    add_run(parser, optional=False)
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder of the second policy; training resumes where it stopped"
    )
    add_changes(parser, "use another objective")
    parser.add_argument("--judge", default="", metavar="VERSION", help="learn from the scores that `rejudge` wrote")
    parser.add_argument("--steps", type=integer(0), default=0, help="number of steps; 0 means all")
    parser.add_argument("--follow", action="store_true", help="follow an active run")
    add_plugins(parser)
    parser.set_defaults(handler=retrain)


async def retrain(args: argparse.Namespace) -> int:
    """Train; print a JSON line per step and leave the weights in the folder."""
    from headrace.config import load
    from headrace.launch.admission import changes
    from headrace.launch.session import bus_of
    from headrace.replay import recorded_run
    from headrace.replay import rejudge as rejudging
    from headrace.replay.objective import other
    from headrace.replay.retrain import SecondTrainer

    folder = runs.find(args.run)
    run_config = load(folder.config)
    changes(args.changes)
    config = other(run_config, args.changes)[0] if args.changes else run_config
    async with bus_of(folder, "replay") as bus:
        run = await recorded_run.of_run(bus, run_config, folder.path, folder.id)
        judging: asyncio.Task[None] | None = None
        if args.judge and args.follow:
            live = rejudging.LiveScores()
            judging = asyncio.create_task(live.follow(bus, folder.id, args.judge))
            second = SecondTrainer(run, config, Path(args.to), live.found, live.more)
        else:
            scores = await rejudging.scores_of(bus, folder.id, args.judge) if args.judge else None
            second = SecondTrainer(run, config, Path(args.to), scores)
        source = follow(bus, folder.id) if args.follow else recorded(run)
        try:
            async for line in second.steps(source, args.steps):
                say(msgspec.json.encode(line).decode())
        finally:
            if judging is not None:
                judging.cancel()
    return 0


async def recorded(run: "RecordedRun") -> "AsyncIterator[StepManifest]":
    """The recorded batches, in order."""
    for step in sorted(run.manifests):
        yield run.manifests[step]


async def follow(bus: "Bus", run: str) -> "AsyncIterator[StepManifest]":
    """The recorded batches, then every new one, without end. Of several incarnations of a step the first counts."""
    from headrace.messages import subjects
    from headrace.messages.training import StepManifest

    seen = -1
    async for received in bus.follow("HR_STEP", subjects.STEP.at(run=run)):
        if isinstance(manifest := received.message, StepManifest) and manifest.step > seen:
            seen = manifest.step
            yield manifest
