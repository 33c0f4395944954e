"""A run in whose sandboxes a harness acts: broker, environment, rollout, judge, and a script in the engine's place."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config, Engine, Harness, Policy, Production, Program, Run, Tasks
from headrace.config import Environment as Section
from headrace.judging.rules import VERSION
from headrace.messages.judging import Score
from headrace.messages.rollout import Limits, RolloutRequest, SlotFailed, Trajectory, Turn, TurnSampled
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, SCORE, TASK, TRAJ, TURN, token
from headrace.messages.tasks import TaskRef
from headrace.registry import admit
from headrace.tasks import open_suite
from headrace.weights import tensor_state
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.chat_formats import CHATML, bundle_of_run
from tests.support.client_engine import PLAYS, Play, Said, Script
from tests.support.paths import ROOT
from tests.support.staged import SHAPE, stage

ENGINE = "tests.support.client_engine:open_engine"
SUITE = "generated/train"
TOOLS = """\
{%- if tools and messages[0].role != 'system' %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"""
LIMITS = Limits(max_turns=20, max_tokens=20_000, context_tokens=60_000)


def task() -> str:
    return open_suite(SUITE).ids()[0]


def fixes(call: str = "bash", key: str = "command") -> Said:
    """The turn that writes the known solution of the task."""
    solution = open_suite(SUITE).oracle(task()).solution
    commands = [f"cat > {path} <<'END-OF-FILE'\n{data.decode()}END-OF-FILE" for path, data in solution.items()]
    return "I fix it.", [(call, {key: "\n".join(commands)})]


class HarnessRun(NamedTuple):
    """The run, and what it publishes."""

    bus: Bus
    run: str
    harness: str
    rollout: Rollout

    async def attempt(
        self, slot: int = 0, group: str = "g", *, suite: str = SUITE, id: str = "", **fields: Any
    ) -> Trajectory | SlotFailed:
        """Issue an attempt and wait for its end."""
        request = RolloutRequest(
            **({"limits": LIMITS} | fields),
            run=self.run,
            lane="train",
            group=group,
            slot=slot,
            attempt=0,
            task=TaskRef(suite, id or task()),
            seed=7,
            harness=self.harness or UNSET,
        )
        await self.bus.publish(TASK.at(run=self.run, lane="train", suite=token(suite)), request)
        found: list[Trajectory | SlotFailed] = []

        async def follow(stream: str, subject: str) -> None:
            async for received in self.bus.follow(stream, subject):
                if received.message.slot == slot:
                    found.append(received.message)
                    return

        waits = [
            asyncio.create_task(follow("HR_TRAJ", TRAJ.at(run=self.run, group=group))),
            asyncio.create_task(follow("HR_LEDGER", FAIL.at(run=self.run, group=group))),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return found[0]

    async def turns(self, trajectory: str) -> list[Turn]:
        """The turns in the log of an attempt."""
        history = self.bus.history("HR_TURN", TURN.at(run=self.run, trajectory=trajectory))
        records = [received.message async for received in history]
        return [record.turn for record in records if isinstance(record, TurnSampled)]

    async def score(self, slot: int = 0, group: str = "g") -> Score:
        """The judge's score of an attempt."""
        async for received in self.bus.follow("HR_SCORE", SCORE.at(run=self.run, judge=VERSION, group=group)):
            if received.message.slot == slot:
                score: Score = received.message
                return score
        raise AssertionError


@asynccontextmanager
async def harness_run(
    connect: Connect,
    folder: Path,
    run: str,
    name: str,
    turns: Sequence[Said],
    *,
    own: Program | None = None,
    backend: str = "process",
    mark: str = "",
    policy: tuple[Policy, dict[str, Any]] | None = None,
    suites: Path | None = None,
    cache: Path = ROOT / ".cache" / "headrace",
    **harness: Any,
) -> AsyncIterator[HarnessRun]:
    """turns: the script. own: the program of a harness that headrace does not know. policy: its section and weights, in
    place of the script."""
    admit("engines", [ENGINE])
    config = Config(
        run=Run(dir=str(folder)),
        policy=SHAPE if policy is None else policy[0],
        engine=Engine() if policy is not None else Engine(kind=ENGINE),
        environment=Section(backend=backend, cache_dir=str(cache)),
        harness=Harness(name=name, **harness),
        harnesses={name: own} if own is not None else {},
        production=Production(enabled=False),
        tasks=Tasks(suite=SUITE, dir=str(suites or folder / "suites")),
    )
    PLAYS.append(Play(Script(mark or '"name": "bash"', list(turns), "A title.")))
    bundle = msgspec.structs.replace(bundle_of_run("hermes"), chat_template=TOOLS + CHATML)
    await renderer_bundles.publish(await connect("trainer"), run, bundle)
    bus = await connect("admin")
    (folder / run).mkdir(parents=True)
    (file := folder / "0.safetensors").touch()
    state_hash = "no weights" if policy is None else tensor_state.write(file, policy[1])
    await stage(bus, run, "n1", 0, str(file), state_hash)
    async with (
        living(Environment, config, await connect("environment", node="n1"), ANY_RUN, "environment"),
        living(Judge, config, await connect("judge"), run, "judge"),
        living(Rollout, config, await connect("rollout", node="n1"), run, "rollout") as rollout,
    ):
        yield HarnessRun(bus, run, name, rollout)
