"""One scripted episode in a real sandbox, and the judge's verdict: python examples/hello_episode.py [process | qemu]"""

import asyncio
import sys
from typing import Any

from headrace.config import Environment
from headrace.harness.loop import run_episode
from headrace.harness.scripted import ScriptedEngine, script
from headrace.judging import Candidate, HostMachines, Options, examine
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling, Trajectory
from headrace.messages.sandbox import Acquire, PullTree
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import open_suite
from headrace.vmhost.node.host import Host


async def report(*event: object, **data: object) -> None:
    print("event:", *event)


async def main(backend: Any = "process") -> None:
    suite = open_suite("generated/heldout")
    task, oracle = suite.task("0"), suite.oracle("0")
    slot: dict[str, Any] = {"run": "hello", "lane": "eval", "group": "g1", "slot": 0, "attempt": 0, "seed": 1}
    host, renderer = await Host.open(Environment(backend=backend)), TerseRenderer(Tokenizer.train((), 400))
    sandbox = await host.acquire(Acquire(**slot, role="rollout", isolation="episode", files=task.files))
    engine, request = ScriptedEngine(script("oracle", task, oracle), renderer), RolloutRequest(**slot, task=task.ref)
    played = await run_episode(engine=engine, sandbox=sandbox, renderer=renderer, request=request, task=task)
    slot |= {"policy": PolicyRef(), "sampling": Sampling(), "isolation": "episode", "task": task.ref, "family": "hello"}
    diff = (await sandbox.call(PullTree(patterns=task.allowed))).files
    trajectory = Trajectory(**slot, id="g1-0-0", outcome="finished", turns=played.turns, diff=diff)
    candidate = Candidate(trajectory=trajectory, task=task, oracle=oracle)
    verdict = await examine(candidate, HostMachines(host), report, Options())
    print(f"{task.prompt}: {len(played.turns)} turns, {played.outcome}, {verdict.decision}")
    await host.close()


asyncio.run(main(*sys.argv[1:]))
