"""`headrace eval`: any policy through the same rollout, environment and judge path as training, measured once.

A scripted policy gets a run of its own. A trained one is measured inside its own run: the broker opens the run's
store again, a weight receiver rebuilds the version from the chain, and the request names it as pinned.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.config import Config, Processes, Production, load
from headrace.launch import runs
from headrace.launch.guests import prepare_host
from headrace.launch.output import say
from headrace.launch.processes import Run
from headrace.launch.runs import RunError
from headrace.launch.signals import Stopping, interruptible
from headrace.messages.rollout import Limits, PolicyRef, Sampling

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.messages.evaluation import EvalResult

GROUPS = (("environment",), ("judge",), ("rollout",), ("evaluator", "dead_letter", "weight_receiver"))


def policy_of(text: str) -> tuple[str, PolicyRef]:
    """The run (empty for scripted policies) and the policy that the argument names."""
    first, _, rest = text.partition(":")
    if first == "scripted":
        if rest not in ("oracle", "idle", "edit-tests"):
            raise RunError(f"there is no scripted policy {rest!r}; there are oracle, idle and edit-tests")
        return "", PolicyRef(kind="scripted", name=rest)
    if rest and not rest.isdigit():
        raise RunError(f"a policy is scripted:NAME, RUN or RUN:VERSION, not {text!r}")
    return first, PolicyRef(kind="pinned", version=int(rest) if rest else -1)


async def evaluate(config: Config, args: argparse.Namespace) -> int:
    """Run the evaluation and print its JSON line; 1 when infrastructure failed some tasks for good."""
    from headrace.tasks import open_suite
    from headrace.tasks.suites import UnknownSuite

    source, policy = policy_of(args.policy)
    try:
        open_suite(args.suite, config.tasks.dir)
    except UnknownSuite as error:
        raise RunError(str(error)) from None

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        root = Path(config.run.dir)
        closing.enter_context(runs.lock(root))
        runs.require_room(root, config.run.min_free_mb)
        await prepare_host(config)
        name = "e" + runs.new_id(config.run.seed)[1:]
        folder = runs.find(source, root) if source else runs.create(root, name, newest=False)
        # A trained policy keeps its run's sizes, limits and engine; where it acts is the command line's choice.
        own = load(folder.config) if source else config
        merged = msgspec.structs.replace(
            own,
            environment=config.environment,
            tasks=config.tasks,
            processes=Processes(groups=GROUPS),
            production=Production(enabled=False),
        )
        run = Run(merged, folder, folder.path / "config-eval.json", stopping)
        closing.push_async_callback(run.close)
        stopping.what = f"the evaluation in run {folder.id} ends unfinished; what it did stays in {folder.path}/"
        return await measured(run, args, policy)

    return await interruptible(body)


async def measured(run: Run, args: argparse.Namespace, policy: PolicyRef) -> int:
    """Start what an evaluation needs, ask, wait for the answer."""
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
    await run.start()
    keeper = asyncio.create_task(run.watch())
    try:
        limits = config.limits
        request = EvalRequest(
            id=f"cli{runs.new_id(0).replace('-', '')}",
            run=folder.id,
            suite=args.suite,
            tasks=args.tasks,
            policy=policy,
            sampling=Sampling(temperature=args.temperature, max_turn_tokens=limits.max_turn_tokens),
            limits=Limits(**{name: getattr(limits, name) for name in limits.__struct_fields__ if name in LIMITS}),
            isolation=config.environment.isolation,
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
    line = {
        "policy": args.policy,
        "suite": result.suite,
        "version": result.version,
        "tasks": result.tasks,
        "passed": result.passed,
        "rate": round(result.rate, 4),
        "infra_failures": result.infra_failures,
    }
    say(json.dumps(line))
    return 1 if result.infra_failures else 0


LIMITS = {"max_turns", "max_tokens", "context_tokens", "wall_s", "max_parallel_calls"}


async def newest(bus: "Bus", run: str) -> int:
    """The newest committed version of a run."""
    from headrace.messages import subjects
    from headrace.messages.weights import WeightHead

    head = await bus.last("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=run))
    if head is None or not isinstance(head.message, WeightHead):
        raise RunError(f"run {run} never published a version")
    return head.message.version


async def result_of(bus: "Bus", run: str, id: str, asked: int) -> "EvalResult":
    """The answer to a request."""
    from headrace.messages import subjects
    from headrace.messages.evaluation import EvalResult

    where = subjects.EVENT.where(run=run, actor="evaluator", type="eval_result")
    async for received in bus.follow("HR_EVENT", where, start=asked):
        if isinstance(received.message, EvalResult) and received.message.id == id:
            return received.message
    raise RunError("the event stream ended", 4)
