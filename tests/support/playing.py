"""A scripted policy plays a task in a sandbox of a host, and the judge examines it: every part but the bus."""

from typing import Any

from msgspec import UNSET

from headrace.harness.loop import run_episode
from headrace.harness.message import run_message
from headrace.harness.scripted import ScriptedEngine, script
from headrace.judging import Candidate, HostMachines, Options, Verdict, examine
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Sampling, Trajectory
from headrace.messages.sandbox import Acquire, Snapshot
from headrace.messages.tasks import ANSWER
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import Suite
from headrace.tasks.diff import pull
from headrace.tasks.sandboxes import begin_step, for_task
from headrace.vmhost.node.host import Host

LIMITS = Limits(max_turns=40, max_tokens=200_000, context_tokens=200_000)


async def report(*event: object, **data: object) -> None: ...


async def played(host: Host | None, suite: Suite, id: str, policy: str, limits: Limits = LIMITS) -> Verdict:
    """The verdict on a scripted policy's attempt at a task."""
    task, oracle = suite.task(id), suite.oracle(id)
    slot: dict[str, Any] = {"run": "p", "lane": "eval", "group": f"{id}-{policy}", "slot": 0, "attempt": 0, "seed": 1}
    request = RolloutRequest(**slot, task=task.ref, limits=limits)
    renderer = TerseRenderer(Tokenizer.train((), 400))
    message = None if task.sandbox else oracle.answer if policy == "oracle" else "done"
    engine = ScriptedEngine(script(policy, task, oracle), renderer, message)
    slot |= {"policy": PolicyRef(), "sampling": Sampling(), "isolation": "episode", "task": task.ref, "family": "p"}
    slot |= {"id": f"{id}-{policy}", "outcome": "finished"}
    if not task.sandbox:

        async def ignore(*_: object) -> None: ...

        episode, text = await run_message(
            engine=engine, renderer=renderer, request=request, task=task, on_sampled=ignore, on_done=ignore
        )
        trajectory = Trajectory(**slot, turns=episode.turns, diff={ANSWER: text.encode()})
    else:
        assert host is not None
        names = ("run", "lane", "group", "slot", "attempt", "seed")
        acquire = Acquire(
            **{name: slot[name] for name in names},
            role="rollout",
            isolation="episode",
        )
        sandbox = await host.acquire(for_task(acquire, task))
        steps: list[Snapshot] = []

        async def on_step(ended: int) -> None:
            steps.append((await pull(sandbox, task, f"step{ended}")).changes)
            await begin_step(sandbox, task, ended, slot["id"])

        episode = await run_episode(
            engine=engine, sandbox=sandbox, renderer=renderer, request=request, task=task, on_step=on_step
        )
        changes = (await pull(sandbox, task, "end")).changes
        host.release(sandbox.id)
        trajectory = Trajectory(
            **slot,
            turns=episode.turns,
            diff=changes.diff,
            deleted=changes.deleted,
            changes=changes.changes,
            originals=changes.originals,
            touched=changes.touched,
            earlier=tuple(steps) if task.later else UNSET,
        )
    candidate = Candidate(trajectory=trajectory, task=task, oracle=oracle)
    machines: Any = HostMachines(host) if host is not None else None
    return await examine(candidate, machines, report, Options())
