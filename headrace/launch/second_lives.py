"""`headrace rejudge` and `headrace retrain`: a recorded river under another judge, and for another trainer."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.config import Config, load, parse
from headrace.launch import runs
from headrace.launch.guests import prepare_host
from headrace.launch.output import say
from headrace.launch.runs import RunError
from headrace.messages import subjects
from headrace.messages.sandbox import Acquire

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.messages.judging import Score
    from headrace.messages.rollout import Trajectory
    from headrace.messages.training import StepManifest
    from headrace.replay.past import Past
    from headrace.replay.rejudging import Verdicts
    from headrace.vmhost.host import Host


async def rejudge(args: argparse.Namespace) -> int:
    """Judge the closed groups of a run again; one JSON line, or one a group for ever."""
    from headrace.launch.commands import bus_of
    from headrace.replay import rejudging
    from headrace.replay.past import ReplayError

    if subjects.token(args.judge) != args.judge:
        raise RunError(f"a judge version is lower case letters, digits, '-' and '_', not {args.judge!r}")
    folder = runs.find(args.run)
    config = with_rewards(load(folder.config), args.changes)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder, "judge"))
        host = None
        if not args.recorded:
            from headrace.vmhost.host import Host

            await prepare_host(config)
            host = await Host.open(config.environment)
            stack.push_async_callback(host.close)
        judge = verdicts(config, host)
        try:
            if args.follow:
                async for group in rejudging.ending(bus, folder.id):
                    one = await rejudging.rejudge(bus, folder.id, args.judge, judge, [group])
                    say(msgspec.json.encode(one).decode())
            groups = await rejudging.closings(bus, folder.id)
            found = await rejudging.rejudge(bus, folder.id, args.judge, judge, groups[: args.groups or None])
        except ReplayError as error:
            raise RunError(str(error), 1) from None
    say(msgspec.json.encode(found).decode())
    return 0


def with_rewards(config: Config, entries: list[str]) -> Config:
    """The run's configuration with other rewards. ConfigError, RunError."""
    parsed = parse("", "--with", entries)
    for entry in entries:
        section, _, key = entry.partition("=")[0].strip().partition(".")
        if section != "algorithm" or not key.startswith("length_"):
            raise RunError(
                f"{section}.{key} is no part of a reward: algorithm.length_penalty, length_k and length_q are"
            )
        value = getattr(parsed.algorithm, key)
        config = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, **{key: value}))
    return config


def verdicts(config: Config, host: "Host | None") -> "Verdicts":
    """Today's judge: rules, rewards, and the hidden tests in a fresh sandbox; without a host what they said then."""
    from headrace.actors import judge_rules
    from headrace.algorithms.rewards import shaped_reward
    from headrace.messages.sandbox import Inspect, RunTests, SandboxLost
    from headrace.replay.past import ReplayError
    from headrace.tasks import UnknownSuite, open_suite
    from headrace.tasks.sealing import settle

    rules = config.algorithm

    async def judge(made: "Trajectory", old: "Score") -> "Score":
        try:
            suite = open_suite(made.task.suite, config.tasks.dir)
            task, oracle = suite.task(made.task.task), suite.oracle(made.task.task)
        except UnknownSuite as error:
            raise ReplayError(str(error)) from None
        tests, crashed = old.tests, old.verdict == "candidate_crash"
        touched = tuple(entry for entry in old.suspicions if entry.startswith("machine_touched:"))
        if host is not None:
            files = judge_rules.tree(task, oracle, made.diff, made.deleted)
            sandbox = await host.acquire(_alone(made, task.template, files))
            try:
                result = await sandbox.call(RunTests(plan=oracle.tests))
                tests, crashed = settle(result.tests, oracle.answers), False
                looked = await sandbox.call(Inspect())
                touched = tuple(f"machine_touched:{what}" for what in looked.touched)
            except SandboxLost:
                tests, crashed = (), True  # alone in its machine, so it was the candidate
            finally:
                host.release(sandbox.id)
        ok = not crashed and judge_rules.passed(tests, oracle.expected)
        found = judge_rules.suspicions(task, oracle, made.diff, made.touched) + judge_rules.behaviour(task, made)
        found += touched + judge_rules.caught(oracle, ok)
        verdict = "candidate_crash" if crashed else judge_rules.verdict(ok, found)
        reward = shaped_reward(
            verdict == "passed",
            tokens=old.sampled_tokens,
            calls=old.calls,
            turns=old.turns,
            weight=rules.length_penalty,
            k=rules.length_k,
            q=rules.length_q,
        )
        return msgspec.structs.replace(
            old, verdict=verdict, passed=verdict == "passed", reward=reward, tests=tests, suspicions=found
        )

    return judge


def _alone(made: "Trajectory", template: str, files: dict[str, bytes]) -> "Acquire":
    """A machine for one diff: if it dies, nobody else did it."""
    return Acquire(
        run="rejudge",
        lane=made.lane,
        role="judge",
        group=made.id,
        slot=made.slot,
        attempt=made.attempt,
        isolation="episode",
        template=template,
        seed=made.seed,
        files=files,
    )


async def retrain(args: argparse.Namespace) -> int:
    """Train a second policy on a run's batches; a JSON line per step, the weights in a folder."""
    from headrace.launch.commands import bus_of
    from headrace.replay import past, rejudging
    from headrace.replay.objective import other
    from headrace.replay.past import ReplayError
    from headrace.replay.second import SecondTrainer
    from headrace.training.checkpoint import CheckpointError
    from headrace.training.trainer import TrainerError

    folder = runs.find(args.run)
    own = load(folder.config)
    try:
        config = other(own, args.changes)[0] if args.changes else own
        async with bus_of(folder, "replay") as bus:
            found = await past.of_run(bus, own, folder.path, folder.id)
            judging: asyncio.Task[None] | None = None
            if args.judge and args.follow:
                live = rejudging.LiveScores()
                judging = asyncio.create_task(live.follow(bus, folder.id, args.judge))
                second = SecondTrainer(found, config, Path(args.to), live.found, live.more)
            else:
                scores = await rejudging.scores_of(bus, folder.id, args.judge) if args.judge else None
                second = SecondTrainer(found, config, Path(args.to), scores)
            source = follow(bus, folder.id) if args.follow else recorded(found)
            try:
                async for line in second.steps(source, args.steps):
                    say(msgspec.json.encode(line).decode())
            finally:
                if judging is not None:
                    judging.cancel()
    except (ReplayError, TrainerError, CheckpointError) as error:
        raise RunError(str(error), 1) from None
    return 0


async def recorded(found: "Past") -> "AsyncIterator[StepManifest]":
    """The batches of the past, in order."""
    for step in sorted(found.manifests):
        yield found.manifests[step]


async def follow(bus: "Bus", run: str) -> "AsyncIterator[StepManifest]":
    """The same, and then every batch as it is announced; for ever. Of several incarnations the first counts."""
    from headrace.messages.training import StepManifest

    seen = -1
    async for received in bus.follow("HR_STEP", subjects.STEP.at(run=run)):
        if isinstance(manifest := received.message, StepManifest) and manifest.step > seen:
            seen = manifest.step
            yield manifest
