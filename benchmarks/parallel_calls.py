"""Tests whether eight calls of one turn wait concurrently, and whether the transcript is independent of their order of
ending.

    python -m benchmarks.parallel_calls [--backend process] [--wait 0.5] [--rounds 5] [--reruns 100]

A scripted policy reads files in one turn, in headrace's own loop and in a real sandbox. Every read waits in the sandbox
first (`sleep`). `ratio` is the time of the turn with eight calls divided by that of a turn with one, each the median of
`--rounds` turns. The reruns wait random times, up to 0.05 s, so that the calls end in another order every time;
`hashes` counts the transcripts that differ (all but the measured times) and `orders` the orders in which calls ended.
"""

import argparse
import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec

from benchmarks.conditions import Figures, at_most, finish
from headrace.config import Environment
from headrace.harness.loop import Episode, run_episode
from headrace.harness.scripted import ScriptedEngine
from headrace.harness.sync_tools import answer
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, ToolResult, Turn
from headrace.messages.sandbox import Acquire, Exec, Op, OpResult, Sandbox
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.rendering.base import Call
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import traces
from headrace.vmhost.node.host import Host

CALLS = 8
REF = TaskRef("parallel", "0")
FILES = {f"part_{number}.py": f"value = {number}\n".encode() for number in range(CALLS)}
Wait = Callable[[Sandbox, str], Awaitable[None]]


class Waiting:
    """A sandbox in which every call waits before it runs."""

    def __init__(self, sandbox: Sandbox, wait: Wait) -> None:
        self._sandbox, self._wait = sandbox, wait
        self.ended: list[str] = []
        """Ids of the calls in the order in which they ended."""

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Wait, then run the operation."""
        await self._wait(self._sandbox, call_id)
        result = await self._sandbox.call(op, call_id)
        self.ended.append(call_id)
        return result


class Turns:
    """Episodes of one turn with calls, and one that finishes."""

    def __init__(self) -> None:
        self._renderer = TerseRenderer(Tokenizer.train(traces.tokenizer_texts(3, 150, Format(), answer), 640))
        self._task = Task(ref=REF, family="parallel", prompt="read", files=FILES, allowed=("**",), tests=TestPlan())
        self._request = RolloutRequest(
            run="parallel", lane="train", group="g000001", slot=0, attempt=0, task=REF, seed=1,
            limits=Limits(context_tokens=1 << 20, max_tokens=1 << 20, max_parallel_calls=CALLS),
            sampling=Sampling(max_turn_tokens=4096),
        )  # fmt: skip

    async def run(self, sandbox: Sandbox, calls: int) -> tuple[Episode, float]:
        """One episode that reads the first `calls` files, and the seconds from its first sample to all results."""
        reads: list[Call] = [("read_file", {"path": path}) for path in sorted(FILES)[:calls]]
        times: list[float] = []

        async def sampled(turn: Turn) -> None:
            times.append(time.monotonic())

        async def done(index: int, results: tuple[ToolResult, ...]) -> None:
            times.append(time.monotonic())

        episode = await run_episode(
            engine=ScriptedEngine([reads, [("finish", {})]], self._renderer),
            sandbox=sandbox,
            renderer=self._renderer,
            request=self._request,
            task=self._task,
            on_sampled=sampled,
            on_done=done,
        )
        return episode, times[1] - times[0]


def transcript(episode: Episode) -> str:
    """The hash of every turn with its results, without the measured times."""
    turns = [
        msgspec.structs.replace(
            turn, results=tuple(msgspec.structs.replace(result, wall_ms=0.0) for result in turn.results)
        )
        for turn in episode.turns
    ]
    return hashlib.sha256(msgspec.msgpack.encode(turns)).hexdigest()


async def sleeping(sandbox: Sandbox, seconds: float) -> None:
    """Wait in the sandbox."""
    result = await sandbox.call(Exec(argv=("sleep", f"{seconds:.4f}")))
    if not result.ok:
        raise RuntimeError(f"sleep in the sandbox failed: {result.error or result.stderr}")


async def measure(backend: str, wait: float, rounds: int, reruns: int) -> Figures:
    """The figures, in one sandbox."""
    turns, draws = Turns(), random.Random(0)
    host = await Host.open(msgspec.convert({"backend": backend, "max_vms": 4}, Environment))
    try:
        sandbox = await host.acquire(
            Acquire(
                run="parallel", lane="train", role="rollout", group="g000001", slot=0, attempt=0, isolation="episode",
                files=FILES,
            )
        )  # fmt: skip

        async def seconds(calls: int) -> float:
            return (await turns.run(Waiting(sandbox, lambda inner, call_id: sleeping(inner, wait)), calls))[1]

        async def drawn(inner: Sandbox, call_id: str) -> None:
            await sleeping(inner, draws.random() * 0.05)

        alone: list[float] = []
        together: list[float] = []
        for _ in range(rounds):  # alternately, so that other load of the machine affects both
            alone.append(await seconds(1))
            together.append(await seconds(CALLS))
        hashes, orders = set(), set()
        for _ in range(reruns):
            waiting = Waiting(sandbox, drawn)
            hashes.add(transcript((await turns.run(waiting, CALLS))[0]))
            orders.add(tuple(waiting.ended))
    finally:
        await host.close()
    one, eight = statistics.median(alone), statistics.median(together)
    return {
        "backend": backend,
        "calls": CALLS,
        "wait_s": wait,
        "one_s": round(one, 4),
        "eight_s": round(eight, 4),
        "ratio": round(eight / one, 4),
        "ratio_max": round(max(b / a for a, b in zip(alone, together, strict=True)), 4),
        "rounds": rounds,
        "reruns": reruns,
        "hashes": len(hashes),
        "orders": len(orders),
    }


def main() -> None:
    """Print the figures with their targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="process", help="of the sandbox")
    parser.add_argument("--wait", type=float, default=0.5, help="seconds that each call waits")
    parser.add_argument("--rounds", type=int, default=5, help="turns with one call, and as many with eight")
    parser.add_argument("--reruns", type=int, default=100)
    args = parser.parse_args()
    figures = asyncio.run(measure(args.backend, args.wait, args.rounds, args.reruns))
    finish(figures, {"ratio": at_most(figures["ratio"], 1.3), "hashes": at_most(figures["hashes"], 1)})


if __name__ == "__main__":
    main()
