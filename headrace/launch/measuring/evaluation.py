"""`headrace eval`: measures a policy through the rollout, environment and judge actors, as in training.

A scripted policy gets a run of its own, and so does a checkpoint folder, whose trainer publishes it as version 0. A
trained policy is measured inside its run: the broker opens the run's store again, a weight receiver rebuilds the
version from the chain, and the request pins that version.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.config import Config, Processes, Production, load
from headrace.launch import runs
from headrace.launch.guests import prepare_host
from headrace.launch.output import say_report
from headrace.launch.processes import Run
from headrace.launch.runs import RunError
from headrace.launch.supervision.signals import Stopping, interruptible
from headrace.ledger.requests import settings_of
from headrace.messages.rollout import PolicyRef
from headrace.registry import admitted

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.messages.evaluation import EvalRequest, EvalResult


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement: a policy as the command line names it, on the first tasks of a suite."""

    policy: str
    """``scripted:NAME``, a checkpoint folder, ``RUN`` or ``RUN:VERSION``."""
    suite: str
    tasks: int = 0
    """Number of tasks; 0 means all of the suite."""
    temperature: float = 1.0


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of `headrace eval`."""

    id: str
    policy: str
    suite: str
    version: int
    tasks: int
    passed: int
    rate: float
    infra_failures: int
    """Tasks without a verdict: infrastructure failed."""


GROUPS = (("environment",), ("judge",), ("rollout",), ("evaluator", "dead_letter", "weight_receiver"))
PUBLISHERS = (("trainer",), ("weight_sender",))
"""The processes that make a checkpoint folder a version."""


class Measurable(NamedTuple):
    """A policy that the command line names."""

    run: str
    """The run that it belongs to; empty: a run of its own."""
    policy: PolicyRef
    checkpoint: str = ""
    """The folder of a policy that no run has published."""
    publishes: bool = False
    """The run's own trainer publishes it."""


def policy_of(text: str) -> Measurable:
    """The policy that an argument names. RunError when it names none."""
    first, _, rest = text.partition(":")
    if first == "scripted":
        if rest not in ("oracle", "idle", "edit-tests"):
            raise RunError(f"there is no scripted policy {rest!r}; expected oracle, idle or edit-tests")
        return Measurable("", PolicyRef(kind="scripted", name=rest))
    if (Path(text) / "config.json").is_file() and not (Path(text) / "broker").exists():
        return Measurable("", PolicyRef(kind="pinned", version=0), str(Path(text).resolve()), publishes=True)
    if rest and not (rest.isascii() and rest.isdigit() and len(rest) < 16):
        raise RunError(f"expected a policy scripted:NAME, a checkpoint folder, RUN or RUN:VERSION, got {text!r}")
    return Measurable(first, PolicyRef(kind="pinned", version=int(rest) if rest else -1))


def require_suite(config: Config, suite: str) -> None:
    """UnknownSuite when there is no such suite, or when it cannot make its first task."""
    from headrace.tasks import open_suite
    from headrace.tasks.base import try_first

    try_first(open_suite(suite, config.tasks.dir))


async def evaluate(config: Config, wanted: Measurement) -> int:
    """Run the evaluation and print its JSON line; 1 when infrastructure failures left tasks without a verdict."""
    named = policy_of(wanted.policy)
    require_suite(config, wanted.suite)

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        await prepare(config, closing)
        run = open_run(config, named, stopping, closing)
        stopping.effect = (
            f"the evaluation in run {run.folder.id} ends unfinished; its records stay in {run.folder.path}/"
        )
        policy = await serve(run, named, closing)
        request = first_request(run, wanted, policy, f"cli{runs.new_id(0).replace('-', '')}", "command line")
        (result,) = await ask(run, [request])
        report = EvalReport(
            id=result.id,
            policy=wanted.policy,
            suite=result.suite,
            version=result.version,
            tasks=result.tasks,
            passed=result.passed,
            rate=round(result.rate, 4),
            infra_failures=result.infra_failures,
        )
        say_report(report)
        return 1 if result.infra_failures else 0

    return await interruptible(body)


async def prepare(config: Config, closing: AsyncExitStack) -> None:
    """Lock the folder of runs for this command, and build what its sandboxes need."""
    root = Path(config.run.dir)
    closing.enter_context(runs.lock(root))
    runs.require_disk(root, config.run.min_free_mb)
    await prepare_host(config)


def open_run(config: Config, named: Measurable, stopping: Stopping, closing: AsyncExitStack, again: str = "") -> Run:
    """The run in which a policy is measured: its own, or a new one. again: the id of a new one that continues where an
    earlier call with the same configuration ended; RunError where it was another one."""
    root = Path(config.run.dir)
    if named.run:
        folder = runs.find(named.run, root)
    elif again:
        folder = runs.create(root, again, newest=False)
    else:
        # A comparison opens two runs within one second.
        name = free = "e" + runs.new_id(config.run.seed)[1:]
        number = 1
        while (root / free).exists():
            free, number = f"{name}-{number}", number + 1
        folder = runs.create(root, free, newest=False)
    # A trained policy keeps its run's sizes, limits and engine; the command line chooses the environment.
    recorded = load(folder.config) if named.run else config
    for key in ("python", "args", "url"):  # a recorded run starts no program and names no server
        if (wanted := recorded.engine.options.get(key)) and wanted != config.engine.options.get(key):
            raise RunError(
                f"run {folder.id} has engine.options.{key} = {wanted!r:.200}, and the configuration of this command "
                f"does not: if you trust it, give --set engine.options.{key}=... or a --config that has it"
            )
    if named.checkpoint:
        recorded = msgspec.structs.replace(
            recorded,
            policy=msgspec.structs.replace(recorded.policy, checkpoint=named.checkpoint),
            mid_training=msgspec.structs.replace(recorded.mid_training, tokens=0),
        )
    merged = msgspec.structs.replace(
        recorded,
        run=msgspec.structs.replace(recorded.run, dir=str(folder.path.parent), plugins=admitted()),
        environment=config.environment,
        tasks=config.tasks,
        processes=Processes(groups=(*GROUPS, *PUBLISHERS) if named.publishes else GROUPS),
        production=Production(enabled=False),
        # The run's queue may still hold requests of its other lanes; this command runs none of them.
        rollout=msgspec.structs.replace(recorded.rollout, lanes=("eval",)),
    )
    if not named.run:
        if again and folder.config.exists() and load(folder.config) != merged:
            raise RunError(f"{folder.path} was begun with another configuration; remove it, or choose another name")
        folder.config.write_bytes(msgspec.json.format(msgspec.json.encode(merged)))
    run = Run(merged, folder, folder.path / "config-eval.json", stopping)
    closing.push_async_callback(run.close)
    return run


async def serve(run: Run, named: Measurable, closing: AsyncExitStack) -> PolicyRef:
    """Start the broker and find the policy's version; RunError when the run never published it."""
    from headrace.bus.connection import Bus

    await run.broker.start()
    if named.policy.kind != "pinned" or named.publishes:
        return named.policy
    async with await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials) as bus:
        last = await newest(bus, run.folder.id)
    if named.policy.version > last:
        raise RunError(f"run {run.folder.id} never published version {named.policy.version}; its newest is {last}")
    return PolicyRef(kind="pinned", version=named.policy.version if named.policy.version >= 0 else last)


def first_request(run: Run, wanted: Measurement, policy: PolicyRef, id: str, reason: str) -> "EvalRequest":
    """The request of a measurement."""
    from headrace.messages.evaluation import EvalRequest

    settings = settings_of(run.config, wanted.temperature)
    return EvalRequest(
        id=id,
        run=run.folder.id,
        suite=wanted.suite,
        tasks=wanted.tasks,
        policy=policy,
        sampling=settings.sampling,
        limits=settings.limits,
        isolation=settings.isolation,
        reason=reason,
    )


async def ask(run: Run, requests: "Sequence[EvalRequest]") -> "list[EvalResult]":
    """Start the run's processes, publish the requests, and wait for their results, in the same order."""
    from headrace.bus.connection import Bus

    async with await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials) as bus:
        await run.start()
        keeper = asyncio.create_task(run.watch())
        try:
            answers = asyncio.ensure_future(_answers(bus, run, requests))
            done, _ = await asyncio.wait({answers, keeper}, return_when=asyncio.FIRST_COMPLETED)
            if keeper in done:
                answers.cancel()
                keeper.result()
            return answers.result()
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})


async def _answers(bus: "Bus", run: Run, requests: "Sequence[EvalRequest]") -> "list[EvalResult]":
    """Publish the requests once there is a version to measure, unless they were before; wait for their results."""
    from headrace.messages import subjects

    if PUBLISHERS[0] in run.config.processes.groups:
        async for _ in bus.follow("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=run.folder.id)):
            break
    subject = subjects.EVENT.at(run=run.folder.id, actor="operator", type="eval_request")
    stored = {getattr(each.message, "id", ""): each.seq async for each in bus.history("HR_EVENT", subject)}
    asked = [stored.get(each.id) or await bus.publish(subject, each, msg_id=each.id) for each in requests]
    return await asyncio.gather(*(result_of(bus, run.folder.id, each.id, min(asked)) for each in requests))


async def newest(bus: "Bus", run: str) -> int:
    """The newest committed version of a run."""
    from headrace.messages import subjects
    from headrace.messages.weights import WeightHead

    head = await bus.last("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=run))
    if head is None or not isinstance(head.message, WeightHead):
        raise RunError(f"run {run} never published a version")
    return head.message.version


async def result_of(bus: "Bus", run: str, id: str, asked: int) -> "EvalResult":
    """The result of a request."""
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalResult

    where = subjects.EVENT.where(run=run, actor="evaluator", type="eval_result")
    async for received in bus.follow("HR_EVENT", where, start=asked):
        if isinstance(received.message, EvalResult) and received.message.id == id:
            return received.message
    raise RunError("the event stream ended before the result", 4)
