"""`headrace eval`: measures a policy through the rollout, environment and judge actors, as in training.

A scripted policy gets a run of its own. A trained policy is measured inside its run: the broker opens the run's store
again, a weight receiver rebuilds the version from the chain, and the request pins that version.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.messages.evaluation import EvalResult


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement: a policy as the command line names it, on the first tasks of a suite."""

    policy: str
    """``scripted:NAME``, ``RUN`` or ``RUN:VERSION``."""
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


def policy_of(text: str) -> tuple[str, PolicyRef]:
    """The run (empty for a scripted policy) and the policy that the argument names."""
    first, _, rest = text.partition(":")
    if first == "scripted":
        if rest not in ("oracle", "idle", "edit-tests"):
            raise RunError(f"there is no scripted policy {rest!r}; expected oracle, idle or edit-tests")
        return "", PolicyRef(kind="scripted", name=rest)
    if rest and not rest.isdigit():
        raise RunError(f"expected a policy scripted:NAME, RUN or RUN:VERSION, got {text!r}")
    return first, PolicyRef(kind="pinned", version=int(rest) if rest else -1)


async def evaluate(config: Config, wanted: Measurement) -> int:
    """Run the evaluation and print its JSON line; 1 when infrastructure failures left tasks without a verdict."""
    from headrace.tasks import open_suite
    from headrace.tasks.base import UnknownSuite

    source, policy = policy_of(wanted.policy)
    try:
        open_suite(wanted.suite, config.tasks.dir)
    except UnknownSuite as error:
        raise RunError(str(error)) from None

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        root = Path(config.run.dir)
        closing.enter_context(runs.lock(root))
        runs.require_disk(root, config.run.min_free_mb)
        await prepare_host(config)
        name = "e" + runs.new_id(config.run.seed)[1:]
        folder = runs.find(source, root) if source else runs.create(root, name, newest=False)
        # A trained policy keeps its run's sizes, limits and engine; the command line chooses the environment.
        recorded = load(folder.config) if source else config
        merged = msgspec.structs.replace(
            recorded,
            run=msgspec.structs.replace(recorded.run, dir=str(folder.path.parent)),
            environment=config.environment,
            tasks=config.tasks,
            processes=Processes(groups=GROUPS),
            production=Production(enabled=False),
            # The run's queue may still hold requests of its other lanes: they are not this command's to run.
            rollout=msgspec.structs.replace(recorded.rollout, lanes=("eval",)),
        )
        run = Run(merged, folder, folder.path / "config-eval.json", stopping)
        closing.push_async_callback(run.close)
        stopping.effect = f"the evaluation in run {folder.id} ends unfinished; its records stay in {folder.path}/"
        return await measured(run, wanted, policy)

    return await interruptible(body)


async def measured(run: Run, wanted: Measurement, policy: PolicyRef) -> int:
    """Start the processes, request the evaluation, and wait for its result."""
    from headrace.bus.connection import Bus
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalRequest

    config, folder = run.config, run.folder
    await run.broker.start()
    bus = await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials)
    if policy.kind == "pinned":
        last = await newest(bus, folder.id)
        if policy.version > last:
            raise RunError(f"run {folder.id} never published version {policy.version}; its newest is {last}")
        policy = PolicyRef(kind="pinned", version=policy.version if policy.version >= 0 else last)
        await ensure_bundle(run)
    await run.start()
    keeper = asyncio.create_task(run.watch())
    try:
        settings = settings_of(config, wanted.temperature)
        request = EvalRequest(
            id=f"cli{runs.new_id(0).replace('-', '')}",
            run=folder.id,
            suite=wanted.suite,
            tasks=wanted.tasks,
            policy=policy,
            sampling=settings.sampling,
            limits=settings.limits,
            isolation=settings.isolation,
            reason="command line",
        )
        subject = subjects.EVENT.at(run=folder.id, actor="operator", type="eval_request")
        asked = await bus.publish(subject, request, msg_id=request.id)
        answer = asyncio.create_task(result_of(bus, folder.id, request.id, asked))
        done, _ = await asyncio.wait({answer, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if keeper in done:
            answer.cancel()
            keeper.result()
        result = answer.result()
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
    await bus.close()
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


async def ensure_bundle(run: Run) -> None:
    """Publish the renderer bundle of a run that was recorded before its trainer did so, from the run's own folder.

    RunError when the folder has no tokenizer: a policy that is read with another one measures nothing.
    """
    from headrace.actors.trainer import initial_policy
    from headrace.bus.connection import Bus
    from headrace.bus.payloads import renderer_bundles
    from headrace.rendering.base import RendererError

    folder = run.folder
    async with await Bus.connect(run.broker.url, role="trainer", credentials=run.broker.credentials) as bus:
        if await renderer_bundles.fetch(bus, folder.id) is not None:
            return
        if not any((folder.path / name).exists() for name in (initial_policy.BUNDLE, "tokenizer.json")):
            raise RunError(
                f"run {folder.id} has no renderer bundle on its broker, and {folder.path} has neither "
                f"{initial_policy.BUNDLE} nor tokenizer.json: its policy cannot be evaluated without its tokenizer"
            )
        try:
            bundle = await asyncio.to_thread(initial_policy.bundle, run.config, folder.path)
        except RendererError as error:
            raise RunError(str(error)) from None
        await renderer_bundles.publish(bus, folder.id, bundle)


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
