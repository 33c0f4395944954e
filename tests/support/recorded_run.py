"""The environment of a trainer, small: real samples of published versions, scores and closings, over the bus."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import torch

from headrace.actors.trainer.actor import Trainer
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages.ledger import ClosedSlot, GroupClosed, StalenessBound
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.subjects import CLOSE, EVENT, SCORE, STEP, TRAJ
from headrace.messages.training import SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.policy.model import Model
from headrace.policy.seam import PolicyModel
from headrace.weights import tensor_state
from tests.support import world
from tests.support.patience import PATIENCE_S

torch.set_num_threads(1)  # two threads on two busy cores wait for each other
GROUP, PER_STEP = 2, 2


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    fields: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder)},
        "curriculum": {"group_size": GROUP, "groups_per_step": PER_STEP, "steps": 50},
        "trainer": {"checkpoint_every": 2},
        **sections,
    }
    changed = {name: msgspec.structs.replace(getattr(world.CONFIG, name), **keys) for name, keys in fields.items()}
    return msgspec.structs.replace(world.CONFIG, **changed)


class RunFeeder:
    """Feeds a run: samples with the published versions, as engines would, and closes groups in order."""

    def __init__(self, bus: Bus, run: str, folder: Path, make: Callable[[], Model] = world.model) -> None:
        """make: a model of the run's policy, with any weights."""
        self.bus, self.run, self._make = bus, run, make
        self.folder = folder / run
        self.folder.mkdir(parents=True)
        (self.folder / "tokenizer.json").write_text(world.TOKENIZER)
        self.models: dict[int, PolicyModel] = {}
        self.hashes: dict[int, str] = {}
        self.plugins: tuple[Plugin, ...] = ()
        """Those that its Scores name."""
        self.size = GROUP
        """Trajectories of a group."""
        self.cut_off = 0
        """The first slots of a group, whose attempts end at their limit of tokens."""
        self._loaded: set[tuple[int, str]] = set()

    async def version(self, number: int, instead_of: str = "") -> SnapshotReady:
        """Wait for a version and load it. instead_of: the hash of its earlier incarnation."""
        async with asyncio.timeout(PATIENCE_S):
            where = EVENT.where(run=self.run, actor="trainer", type="snapshot_ready")
            async for received in self.bus.follow("HR_EVENT", where):
                ready = received.message
                if (ready.version, ready.state_hash) not in self._loaded:
                    self._loaded.add((ready.version, ready.state_hash))
                    self.models[ready.version] = self._make()
                    self.models[ready.version].load_state(tensor_state.read(ready.path))
                    self.hashes[ready.version] = ready.state_hash
                if ready.version == number and ready.state_hash != instead_of:
                    assert isinstance(ready, SnapshotReady)
                    return ready
        raise AssertionError

    async def bound(self, bound: int, first_batch: int) -> None:
        """Say a staleness bound, as the curriculum does."""
        record = StalenessBound(run=self.run, bound=bound, first_batch=first_batch)
        await self.bus.publish(CLOSE.at(run=self.run, group="bound"), record)

    async def group(self, batch: int, number: int, spoilt: bool = False, lag: int = 1) -> None:
        """Sample, score and close one group of a batch. A quarter of its tokens is `lag` versions old."""
        name, versions = f"g{batch * PER_STEP + number:06d}", [max(0, batch - lag), batch, batch, batch]
        wanted = [world.Sampled(name, slot, batch * 10 + number) for slot in range(self.size)]
        sampled = [tested(made) for made in world.episodes(self.models, wanted, versions)]
        await self.close(name, [without_logprobs(made) for made in sampled] if spoilt else sampled, versions[0])

    async def close(self, name: str, sampled: Sequence[Trajectory], oldest: int) -> None:
        """Publish the trajectories of a group, their scores and the closing. oldest: version of the oldest token."""
        slots = []
        for slot, made in enumerate(sampled):
            outcome = "max_tokens" if slot < self.cut_off else made.outcome
            made = msgspec.structs.replace(made, run=self.run, outcome=outcome)
            seq = await self.bus.publish(TRAJ.at(run=self.run, group=name), made)
            score = msgspec.structs.replace(world.score(made), run=self.run, trajectory_seq=seq, plugins=self.plugins)
            where = SCORE.at(run=self.run, judge="j1", group=name)
            score_seq = await self.bus.publish(where, score)
            slots.append(
                ClosedSlot(
                    slot=slot,
                    attempt=0,
                    trajectory_seq=seq,
                    score_seq=score_seq,
                    reward=score.reward,
                    oldest_version=oldest,
                )
            )
        closed = GroupClosed(
            run=self.run,
            group=name,
            task=made.task,
            group_size=len(sampled),
            slots=tuple(slots),
            oldest_version=oldest,
        )
        await self.bus.publish(CLOSE.at(run=self.run, group=name), closed)

    async def batch(self, number: int, spoilt: bool = False, lag: int = 1) -> None:
        """All groups of one batch."""
        await self.version(number)
        for group in range(PER_STEP):
            await self.group(number, group, spoilt, lag)

    async def steps(self) -> list[StepManifest | StepDone | StepFailed]:
        """The records about steps."""
        records = [r.message async for r in self.bus.history("HR_STEP", STEP.at(run=self.run))]
        return [record for record in records if isinstance(record, StepManifest | StepDone | StepFailed)]


def tested(made: Trajectory) -> Trajectory:
    """The trajectory with a call of the tests in its last turn."""
    call = ToolCall(id=f"{made.turns[-1].index}.0", name="run_tests")
    result = ToolResult(call_id=call.id, ok=True, output="1 passed")
    last = msgspec.structs.replace(made.turns[-1], calls=(call,), results=(result,))
    return msgspec.structs.replace(made, turns=(*made.turns[:-1], last))


def without_logprobs(made: Trajectory) -> Trajectory:
    turns: list[Turn] = [msgspec.structs.replace(t, logprobs=type(t.logprobs)("<f4", (0,), b"")) for t in made.turns]
    return msgspec.structs.replace(made, turns=tuple(turns))


def kill(actor: Trainer) -> None:
    """As kill -9 would: nothing more is written, nothing is told."""
    for task in [*actor._tasks, *actor._open]:
        task.cancel()
    if actor._announcing is not None:
        actor._announcing.cancel()  # its thread does not wait for a record that nobody writes any more
    actor._pool.shutdown(wait=True, cancel_futures=True)


def new_run() -> str:
    return f"r{token_hex(4)}"
