"""The transcript of a turn with eight calls does not depend on the order in which they end."""

import asyncio
import hashlib
import itertools
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headrace.harness.loop import Episode, run_episode
from headrace.harness.scripted import ScriptedEngine
from headrace.harness.sync_tools import answer
from headrace.messages.rollout import Limits, RolloutRequest, Sampling
from headrace.messages.sandbox import Op, OpResult, Sandbox
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.rendering.base import Call
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import traces
from headrace.tasks.local import LocalFiles

pytestmark = pytest.mark.anyio

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

    async def run(self, sandbox: Sandbox) -> Episode:
        """One episode that reads all files in one turn."""
        reads: list[Call] = [("read_file", {"path": path}) for path in sorted(FILES)]
        return await run_episode(
            engine=ScriptedEngine([reads, [("finish", {})]], self._renderer),
            sandbox=sandbox,
            renderer=self._renderer,
            request=self._request,
            task=self._task,
        )


def transcript(episode: Episode) -> str:
    """The hash of every turn with its results, without the measured times."""
    turns = [
        msgspec.structs.replace(
            turn, results=tuple(msgspec.structs.replace(result, wall_ms=0.0) for result in turn.results)
        )
        for turn in episode.turns
    ]
    return hashlib.sha256(msgspec.msgpack.encode(turns)).hexdigest()


async def test_eight_calls_wait_together_and_their_transcript_has_one_hash() -> None:
    turns, draws = Turns(), random.Random(0)
    hashes, orders = set(), set()
    for _ in range(100):
        gates = [asyncio.Event() for _ in range(CALLS)]
        order = draws.sample(range(CALLS), CALLS)
        numbers = itertools.count()

        async def wait(
            inner: Sandbox,
            call_id: str,
            gates: list[asyncio.Event] = gates,
            order: list[int] = order,
            numbers: "itertools.count[int]" = numbers,
        ) -> None:
            """A call ends only after all have begun, and after those before it in a drawn order."""
            number = next(numbers)
            if number == CALLS - 1:
                gates[0].set()
            place = order.index(number)
            async with asyncio.timeout(60):  # calls that do not run together would wait for ever
                await gates[place].wait()
            if place + 1 < CALLS:
                gates[place + 1].set()

        sandbox = Waiting(LocalFiles(FILES), wait)
        episode = await turns.run(sandbox)
        assert [result.output for result in episode.turns[0].results] == [f"1:value = {n}" for n in range(CALLS)]
        hashes.add(transcript(episode))
        orders.add(tuple(sandbox.ended))
    assert len(hashes) == 1 and len(orders) > 90
