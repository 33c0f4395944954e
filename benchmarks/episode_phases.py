"""Measures the CPU time of an episode of the demo phase by phase, beside `benchmarks.episode` in groups.

    python -m benchmarks.episode_phases [--rounds 2] [--groups 2]

The two alternate, and both run at the load of the same minutes. A group has eight attempts at one task of the demo's
suite, with the calls of a policy that finds the bug, and with what the rollout and the judge add: the digest of the
workspace before the first call, the pull after the last one, the sealed hidden tests, the integrity check. One second
verdict per group, in a machine of its own, is measured too and counts with the share that the configuration gives.

A phase is the CPU time of all clones between its first and its last call: the eight slots make the same call at the
same time. The first call of its kind in a machine is dearer, because the emulator translates what it runs. In a run
the calls of a group are spread over seconds and the trainer and the sampler compete for the caches; neither is in
these figures.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import uvloop

from benchmarks.conditions import Figures, at_most, cannot_run, finish
from benchmarks.episode import GROUP, measure
from headrace.config import Config, Environment
from headrace.judging.candidates import repository
from headrace.messages.sandbox import (
    Acquire,
    CheckIntegrity,
    GroupKey,
    Isolation,
    OpResult,
    PullTree,
    ReplaceLines,
    Role,
    RunTests,
    Search,
)
from headrace.tasks.diff import PULL_LIMIT
from headrace.tasks.generated.repositories import SEEDS, Made, make
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox

RUN = "phases"
T = TypeVar("T")


class Phases:
    """CPU-ms of the clones of a host by phase."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.spent: defaultdict[str, float] = defaultdict(float)

    async def phase(self, name: str, *work: Awaitable[T]) -> list[T]:
        """Wait for the work and add its CPU time to the phase."""
        before = self.host.usage()["vm_cpu_ms"]
        results = await asyncio.gather(*work)
        self.spent[name] += self.host.usage()["vm_cpu_ms"] - before
        return results

    async def acquire(
        self,
        name: str,
        role: Role,
        group: str,
        files: dict[str, bytes],
        isolation: Isolation = "group",
        size: int = GROUP,
    ) -> list[VmSandbox]:
        """Sandboxes for the attempts of a group."""
        requests = [
            Acquire(
                run=RUN, lane="train", role=role, group=group, slot=slot, attempt=0, isolation=isolation, files=files
            )
            for slot in range(size)
        ]
        return await self.phase(name, *map(self.host.acquire, requests))

    async def end(self, name: str, role: Role, group: str, sandboxes: Sequence[VmSandbox]) -> None:
        """Release the group's sandboxes and wait for the end of its machine."""

        async def settled() -> None:
            for sandbox in sandboxes:
                self.host.release(sandbox.id)
            self.host.release_group(GroupKey(RUN, "train", role, group))
            await self.host.settle()

        await self.phase(name, settled())


async def _group(phases: Phases, group: str, made: Made) -> None:
    """Eight attempts that find the bug, their verdicts, and one second verdict."""
    task, oracle = made.task, made.oracle
    sandboxes = await phases.acquire("rollout_acquire", "rollout", group, task.files)

    async def each(phase: str, op: Callable[[VmSandbox], Awaitable[OpResult]]) -> list[OpResult]:
        return await phases.phase(phase, *map(op, sandboxes))

    fix = ReplaceLines(path=made.path, first=made.line, last=made.line, text=made.fixed + "\n")
    await each("rollout_digest", lambda sandbox: sandbox.call(PullTree(patterns=())))
    await each("rollout_search", lambda sandbox: sandbox.call(Search(pattern=f"def {made.target.name}")))
    await each("rollout_edit", lambda sandbox: sandbox.call(fix))
    tested = await each("rollout_tests", lambda sandbox: sandbox.call(RunTests(plan=task.tests)))
    assert all(result.ok for result in tested), tested
    trees = await each("rollout_pull", lambda sandbox: sandbox.call(PullTree(patterns=("**",), limit=PULL_LIMIT)))
    await phases.end("rollout_end", "rollout", group, sandboxes)
    files = repository(task, oracle, {made.path: trees[0].files[made.path]}, ())
    sandboxes = await phases.acquire("judge_acquire", "judge", group, files)
    judged = await each("judge_tests", lambda sandbox: sandbox.call(RunTests(plan=oracle.tests)))
    assert all(result.ok and len(result.tests) == len(oracle.expected) for result in judged), judged
    await each("judge_integrity", lambda sandbox: sandbox.call(CheckIntegrity()))
    await phases.end("judge_end", "judge", group, sandboxes)
    alone = await phases.acquire("second_verdict", "judge", f"{group}-alone", files, "episode", 1)
    await phases.phase("second_verdict", alone[0].call(RunTests(plan=oracle.tests)), alone[0].call(CheckIntegrity()))
    await phases.end("second_verdict", "judge", f"{group}-alone", alone)


async def demo_phases(environment: Environment, groups: int) -> dict[str, float]:
    """CPU-ms of the clones per episode and phase; of the second verdict per verdict. VmhostError."""
    host = await Host.open(environment)
    assert host.backend == "qemu"
    phases = Phases(host)
    await _group(phases, "warm", make("train", SEEDS["train"].start))
    phases.spent.clear()
    for number in range(groups):
        await _group(phases, f"g{number}", make("train", SEEDS["train"].start + 1 + number))
    await host.close()
    return {name: spent / groups / (1 if name == "second_verdict" else GROUP) for name, spent in phases.spent.items()}


def main() -> None:
    """Measure both, alternately."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episode_phases", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="how often the two alternate")
    parser.add_argument("--groups", type=int, default=2, help="groups of eight per round")
    arguments = parser.parse_args()
    environment = Environment(warm_most=1)  # clones that are kept ready after a burst are not part of an episode's cost
    bench: list[float] = []
    rounds: list[dict[str, float]] = []
    try:
        for _ in range(arguments.rounds):
            cost = uvloop.run(measure(environment, "group", arguments.groups, GROUP))
            bench.append(cost.cpu - cost.driver)
            rounds.append(uvloop.run(demo_phases(environment, arguments.groups)))
    except VmhostError as error:
        cannot_run(str(error))
    phases = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
    share = Config().judge.again
    per_episode = [sum(spent.values()) - (1 - share) * spent["second_verdict"] for spent in rounds]
    ratio = statistics.median(demo / group for demo, group in zip(per_episode, bench, strict=True))
    figures: Figures = {
        "bench_group_vm_cpu_ms_per_episode": [round(cost, 1) for cost in bench],
        "demo_vm_cpu_ms_per_episode": [round(cost, 1) for cost in per_episode],
        "same_load_ratio": round(ratio, 2),
        **{f"{name}_cpu_ms": round(spent, 1) for name, spent in phases.items()},
        "second_verdict_share": share,
    }
    finish(figures, {"same_load_ratio": at_most(ratio, 1.5)}, "headrace")


if __name__ == "__main__":
    main()
