"""A run's trainer on several processes: the class that each of them holds.

The first process is the actor's. It sends each call of step, give_up, publish, save and close to the others as an order
(`Take`, `GiveUp`, `Publish`, `Save`, `Stop`) with the same arguments, and then makes the call itself; re-scoring is
part of a step. Version 0 is made by all processes: each reads its own rows of an imported policy, or draws those of a
new one, and mid-training computes over all of them (`mid_training.ranks`). A checkpoint does not depend on the number
of processes that wrote it, so any number of them can take rows of it.

Nodes share no folder: all files are node 0's, and processes of other nodes read and write through it (`far`). Of
several copies of the state the first one reads and writes, and the others get their rows from it.

A process that ends, or raises where the others do not, ends the group with `GroupError`. The files are complete then,
and a new trainer continues from the checkpoint. An exception of a step, in whichever process, is a `StepRaised`.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import RankLayout, StepManifest
from headrace.policy.numerics import Numerics
from headrace.training import checkpoint
from headrace.training.device import TrainerError
from headrace.training.gradient import nothing
from headrace.training.guard import Guard
from headrace.training.outcome import StepOutcome
from headrace.training.parallel import published, rows, sharding
from headrace.training.parallel.group import ProcessGroup, broken
from headrace.training.parallel.interface import GroupError, StepRaised
from headrace.training.parallel.nodes import ranks
from headrace.training.parallel.records import RankRecords
from headrace.training.parallel.state import ShardedState
from headrace.training.parallel.versions import ShardedVersions
from headrace.training.served.publication import Publication
from headrace.training.trainer import PolicyTrainer


class Take(msgspec.Struct, frozen=True, tag=True):
    """Call `step`."""

    config: Config
    manifest: StepManifest
    trajectories: dict[int, Trajectory]
    """Those that were not sent ahead (`records`)."""
    sent: list[int]
    """The sequences of the others."""
    scores: dict[int, Score]
    hashed: bool


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Call `give_up`."""

    config: Config
    reason: str
    detail: str
    hashed: bool


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Call `publish`."""

    folder: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Call `save`."""

    position: dict[str, int | str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


Order = Take | GiveUp | Publish | Save | Stop
"""A call that the other processes make as well."""


class ShardedTrainer(PolicyTrainer):
    """A `PolicyTrainer` of whose state this process holds a part."""

    def __init__(self, config: Config, folder: Path, state: ShardedState, numerics: Numerics) -> None:
        """Use `opening.open_ranks`, or `opening.joined` in the other processes."""
        super().__init__(config, folder, state, numerics)
        self.sharded = state
        self.world: ProcessGroup = state.world
        self.clock = state.world.clock
        self.data_parallel = state.world
        self.versions: ShardedVersions = ShardedVersions(state)
        self.records = RankRecords(state.world.ahead, self.ahead)
        self.others: ranks.Ranks | None = None
        """In the first process: the other processes; None in those."""
        self._reference: sharding.ShardedModel | None = None
        self.read_bytes = 0
        """Bytes of the policy's own checkpoint of which version 0 was made here; 0 for a new or a resumed policy."""

    @property
    def layout(self) -> RankLayout:
        """As `PolicyTrainer.layout`."""
        return self.world.layout

    @property
    def ended(self) -> bool:
        """As `PolicyTrainer.ended`, in the first process."""
        return self.others is None

    def lead(self, others: ranks.Ranks, *, resumed: bool) -> None:
        """In the first process: the other ones."""
        self.others, self.resumed = others, resumed

    def _tell(self, order: Order) -> None:
        """In the first process: send the call to the others. In the others: nothing."""
        if self.world.rank == 0:
            self._guarded(lambda: self.world.tell(order))

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run `work`; raise GroupError, which names the process that has ended, when a collective fails."""
        try:
            return work()
        except (OSError, ValueError, TrainerError):
            raise
        except RuntimeError as error:
            self._end(error)

    def _end(self, error: Exception, *, step: bool = False) -> None:
        """End the group and raise GroupError with the cause. step: as `Ranks.explained`."""
        others = self.others
        if others is None:
            raise GroupError(f"{type(error).__name__}: {error}") from error
        explained = others.explained(error, f"version {self.state.version}", step=step)
        try:
            others.end(self._settle)
        finally:
            self.others = None
        raise explained from error

    def _settle(self) -> None:
        """End the threads that use the group's connections."""
        self.state.settle(end=True)
        self.records.close()

    def expect(self, trajectories: Mapping[int, Trajectory]) -> None:
        """As `PolicyTrainer.expect`, in every process."""
        super().expect(trajectories)
        self.records.send(trajectories)

    def step(
        self,
        manifest: StepManifest,
        trajectories: Mapping[int, Trajectory],
        scores: Mapping[int, Score],
        before_update: Callable[[], None] = nothing,
        hashed: bool = True,
        before_forward: Callable[[], None] = nothing,
    ) -> StepOutcome:
        """As `PolicyTrainer.step`. GroupError when the group ended, StepRaised when an exception ended it."""
        if self.world.rank == 0:
            if manifest.version != self.state.version:
                raise ValueError(f"the manifest updates version {manifest.version}, this is {self.state.version}")
            sent: list[int] = self._guarded(lambda: self.records.sent(trajectories))
            rest = {seq: trajectory for seq, trajectory in trajectories.items() if seq not in sent}
            self._tell(Take(self.config, manifest, rest, sent, dict(scores), hashed))
        before = self.clock.seconds["communication"]
        try:
            outcome = super().step(manifest, trajectories, scores, before_update, hashed, before_forward)
            # The slowest process waits least in its collectives: what others wait longer, they wait for it.
            spent = self.clock.seconds["communication"] - before
            every = self.world.gathered((spent, outcome.peak_bytes), tuple[float, int])
            collectives = tuple(seconds for seconds, _ in every)
            self.clock.waited(spent - min(collectives))
            peak = max(peak for _, peak in every)
            return msgspec.structs.replace(outcome, collectives_s=collectives, peak_bytes=peak)
        except TrainerError:
            raise  # a plugin differs from the manifest's: every process compares the hashes first, so all of them raise
        except Exception as error:
            lost = broken(error)
            if not lost:
                self.state.settle()  # the processes still copy the version before this step
            if self.world.rank == 0:
                self._end(error, step=True)
            if lost:
                raise
            text = f"{type(error).__name__}: {error}"
            raise StepRaised(text, text, text) from error

    def give_up(self, reason: str, detail: str, *, hashed: bool = True) -> StepOutcome:
        """As `PolicyTrainer.give_up`."""
        self._tell(GiveUp(self.config, reason, detail, hashed))
        return super().give_up(reason, detail, hashed=hashed)

    def publish(self, folder: Path) -> Publication:
        """As `PolicyTrainer.publish`, each process its own rows."""
        self._tell(Publish(str(folder)))
        return super().publish(folder)

    def explained(self, error: Exception) -> Exception:
        """As `PolicyTrainer.explained`: a broken connection is a GroupError that names the process which has ended."""
        others = self.others
        if not isinstance(error, RuntimeError) or others is None:
            return error
        return others.explained(error, f"version {self.state.version}")

    def save(self, position: Mapping[str, int | str]) -> None:
        """Replace the checkpoint durably, each process its own rows. OSError as `rows.write`."""
        self._tell(Save(dict(position)))
        self._guarded(lambda: self._save(position))

    def _save(self, position: Mapping[str, int | str]) -> None:
        shards = self.sharded
        shards.sharded.reshard()
        guard = self.saved_guard
        copies = {f"guard.{name}": value for name, value in (guard or Guard()).dump()[1].items()}
        described, parts = shards.whole(shards.tensors() | copies)
        earlier = {version: self.versions.rows(version) for version in self.versions.earlier}
        if self._reference is not None:
            earlier[-1] = {name: shards.served(name, values) for name, values in self._reference.local.items()}
        for version, served in earlier.items():
            head = f"kept.{version}."
            infos = published.infos(shards.model.config, shards.sharded.shapes)
            described += [msgspec.structs.replace(info, name=head + info.name) for info in infos]
            parts += [run._replace(name=head + run.name) for run in shards.runs(served)]
        about = checkpoint.facts(shards, sorted(earlier), position, guard)
        shards.write(self.folder / "checkpoint.safetensors", described, parts, about)
        self.versions.release()
        self.position = dict(position)

    @torch.no_grad()
    def fill(self, source: Path | None) -> None:
        """Set the weights to those of a checkpoint folder or a snapshot file, or of a new policy: this process reads or
        draws its own rows. All processes call it. CheckpointError of the policy."""
        if self.state.model.config.adapter:
            self.sharded.adapt(self.config.run.seed)
        if source is None:
            self.sharded.draw(self.config.run.seed)
        else:
            self.read_bytes = published.read(self.state.model.config, self.sharded.sharded, self.world, source)

    @torch.no_grad()
    def begin(self) -> None:
        """Make the weights version 0, and write it as a checkpoint. All processes call it."""
        if self.config.algorithm.kl_weight > 0.0:
            local = self.sharded.sharded.local
            self._take_reference({name: self.sharded.served(name, tensor) for name, tensor in local.items()})
        self._save({})
        self.sharded.hash()

    def load(self, file: Path) -> None:
        """Restore the trainer from a checkpoint of node 0, of which this process takes its own rows: in copy 0 from the
        file, in the others from the process of copy 0 that has the same rows. CheckpointError, TrainerError."""
        shards, world = self.sharded, self.world
        source = shards.source(file)
        about = shards.read(file, source)
        self._new_log()
        self.versions = ShardedVersions(shards)
        later = self.versions.rows(shards.version)
        for version in sorted(json.loads(about["kept"]), reverse=True):
            _, served = world.copied(partial(self._served, source, version), int)
            served = {name: rows.to(shards.sharded.local[name].device) for name, rows in served.items()}
            if version < 0:
                self._take_reference(served)
            else:
                self.versions.restore(version, served, later)
                later = served
        if self.config.algorithm.kl_weight > 0.0 and self._reference is None:
            raise TrainerError(f"{file} holds no reference policy, and kl_weight > 0 needs one")
        _, copies = world.copied(lambda: (0, source.rows("guard") if source is not None else {}), int)
        copies = {name: value.to(shards.rows_of(name).device) for name, value in copies.items()}
        self.guard = Guard.load(json.loads(about["guard"]), copies) if "guard" in about else Guard()
        self.position, self.resumed = json.loads(about["position"]), True
        shards.hash()

    def _restore(self, file: Path) -> None:
        self.sharded.read(file, self.sharded.source(file))

    def _served(self, source: rows.RowSource | None, version: int) -> tuple[int, dict[str, Tensor]]:
        """A kept version, and this process's served rows of it."""
        assert source is not None
        with source.kept(version) as read:
            return version, published.take(self.state.model.config, self.sharded.sharded, read)

    def _take_reference(self, served: Mapping[str, Tensor]) -> None:
        offload = self.config.trainer.offload == "optimizer"
        config, numerics = self.state.model.config, self.numerics
        reference = sharding.build(config, numerics, self.world, offload=offload, fixed=True)
        with torch.no_grad():
            for name, tensor in reference.local.items():
                tensor.copy_(served[name])
        self._reference, self.reference = reference, reference.model

    def obey(self) -> None:
        """In every process except the first: repeat the calls of the first process until it sends `stop`."""
        self.records.listen()
        while True:
            order: Order = self.world.hear(Order)
            match order:
                case Stop():
                    self.records.ended()
                    self.state.settle(end=True)
                    return
                case Take(config, manifest, trajectories, sent, scores, hashed):
                    self.config = config
                    with self.clock.spent("busy"):  # as in the first process: collectives then count as communication
                        self.step(manifest, trajectories | self.records.take(sent), scores, hashed=hashed)
                case GiveUp(config, reason, detail, hashed):
                    self.config = config
                    self.give_up(reason, detail, hashed=hashed)
                case Publish(folder):
                    self.publish(Path(folder))
                case Save(position):
                    self.save(position)

    def close(self) -> None:
        """Finish the open publication, tell the other processes to stop, and leave the group."""
        super().close()
        self.records.close()
        if self.others is not None:
            self.others.stop(lambda: self.world.tell(Stop()))
            self.others = None
