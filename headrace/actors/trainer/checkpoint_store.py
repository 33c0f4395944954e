"""The trainer's files: snapshots and checkpoints, and the retention of files and of records of past steps."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.payloads import retention
from headrace.config import Config, versions
from headrace.messages.subjects import SCORE, STEP, TRAJ, TURN
from headrace.messages.training import RecordsPurged, StepManifest
from headrace.training.served.publication import Publication, path_of
from headrace.training.trainer import PolicyTrainer
from headrace.weights import snapshot

STORED_BEFORE_S = 60.0
"""Longest time in seconds between storing a payload in the node's shared folder and publishing its record."""


class CheckpointStore:
    """Snapshots and checkpoints of one run. Call the blocking methods in the trainer's thread."""

    def __init__(self, folder: Path, trainer: PolicyTrainer, config: Config) -> None:
        self.snapshots = versions.folder(config, folder.name) / "snapshots"
        self.checkpoints = folder / "checkpoints"
        self.trainer, self.config = trainer, config
        self.snapshots.mkdir(parents=True, exist_ok=True)
        self._firsts: dict[int, tuple[int, int]] = {}
        """Step to the first sequences of a trajectory and of a score in its manifests; without purged steps."""
        self._bytes: dict[int, int] = {}
        """Step to the bytes of its records; without purged steps."""
        self._turns: dict[int, int] = {}
        """Step to the first sequence of its turns, where they have routes."""
        self._old: RecordsPurged | None = None
        """The newest deletion."""
        self._read = 0
        """Sequence of the last record of HR_STEP that a purge has read."""
        snapshot.discard_abandoned(self.snapshots)
        self._name_checkpoint()

    def publish(self, state_hash: str = "") -> Publication:
        """Begin to write the current version's bytes, once. state_hash: if it is given, an existing file with that hash
        is used."""
        path = path_of(self.snapshots, self.trainer.version, state_hash)
        if state_hash and path.exists():
            return Publication.existing(path, state_hash)
        return self.trainer.publish(self.snapshots)

    def forget(self, version: int) -> None:
        """Delete the files of all versions but this one and the one before it; the weight sender keeps a link of its
        own and publishes the newest."""
        for other in self.snapshots.glob("v*.safetensors"):
            if int(other.name[1:9]) < version - 1:
                other.unlink(missing_ok=True)

    def checkpoint(self, position: Mapping[str, int | str]) -> None:
        """Replace the checkpoint durably, and link it under its version's name for replay."""
        self.trainer.save(position)
        self._name_checkpoint()
        oldest = self.trainer.version - self.kept_steps()
        files = sorted(self.checkpoints.glob("v*.safetensors"))
        starts = [file for file in files if int(file.name[1:9]) <= oldest]
        for file in starts[:-1]:  # the replay of the oldest kept step starts from the newest of them
            file.unlink(missing_ok=True)

    def kept_steps(self) -> int:
        """Newest steps that are kept: `replay.keep_steps`, or as many as `replay.keep_gib` holds; at least as many as
        open groups and batches to come may need, under the bound that the last step had."""
        section, staleness = self.config.replay, self.config.curriculum.staleness
        most, left = section.keep_steps, section.keep_gib * 2**30
        for count, step in enumerate(sorted(self._bytes, reverse=True)):
            left -= self._bytes[step]
            if section.keep_gib and left < 0:
                most = min(most, count)
                break
        return max(most, staleness + 2, self.trainer.config.curriculum.staleness + 2)

    def _name_checkpoint(self) -> None:
        named = self.checkpoints / f"v{self.trainer.version:08d}.safetensors"
        named.unlink(missing_ok=True)
        os.link(self.checkpoints / "checkpoint.safetensors", named)

    async def old_records(self, bus: Bus, run: str) -> RecordsPurged | None:
        """Names the records of steps before the oldest kept checkpoint; None when they are deleted.

        A kept step is replayed from the checkpoint before it, so the steps between the two stay as well.
        """
        oldest = min((int(file.name[1:9]) for file in self.checkpoints.glob("v*.safetensors")), default=0)
        await self.read_manifests(bus, run)
        self._firsts = {step: first for step, first in self._firsts.items() if step >= oldest}
        self._turns = {step: first for step, first in self._turns.items() if step >= oldest}
        self._bytes = {step: size for step, size in self._bytes.items() if step >= oldest}
        if not oldest or not self._firsts:
            return None
        first, first_score = (min(column) for column in zip(*self._firsts.values(), strict=True))
        old = RecordsPurged(run=run, step=oldest, trajectory_seq=first, score_seq=first_score)
        if old == self._old:
            return None
        self._old = old
        return old

    async def purge(self, bus: Bus, old: RecordsPurged) -> int:
        """Delete trajectories, turns and scores. Returns the number of messages. old: is in the stream already, so that
        the audit knows of every record that is missing."""
        run, first = old.run, old.trajectory_seq
        purged = await retention.purge(bus, "HR_TRAJ", TRAJ.where(run=run), first)
        purged += await retention.purge(bus, "HR_SCORE", SCORE.where(run=run), old.score_seq)
        try:
            moment = (await bus.get("HR_TRAJ", first)).time
        except MessageGone:  # it was deleted with its user's data
            return purged
        # A trajectory without its routes has them in its turns. Those of a later batch began after a version that the
        # oldest kept step precedes, so they lie behind.
        turn = min(self._turns.values(), default=0)
        if turn:
            with suppress(MessageGone):
                moment = min(moment, (await bus.get("HR_TURN", turn)).time)
        if bus.shared_memory is not None:
            bus.shared_memory.collect(before=moment - STORED_BEFORE_S)
        before = turn or await self._turn_at(bus, run, moment)
        return purged + (await retention.purge(bus, "HR_TURN", TURN.where(run=run), before) if before else 0)

    async def read_manifests(self, bus: Bus, run: str) -> None:
        """Read the manifests that were written since the last call: a purge runs at every checkpoint, between two
        steps, and HR_STEP keeps the records of all steps."""
        async for received in bus.history("HR_STEP", STEP.at(run=run), start=self._read + 1):
            self._read, manifest = received.seq, received.message
            if not isinstance(manifest, StepManifest):
                continue
            self._bytes[manifest.step] = manifest.bytes
            if manifest.turn_seq:
                self._turns[manifest.step] = min(manifest.turn_seq, self._turns.get(manifest.step, manifest.turn_seq))
            for slot in (slot for group in manifest.groups for slot in group.slots):
                first = self._firsts.get(manifest.step, slot)  # of an earlier incarnation of the step
                self._firsts[manifest.step] = min(first[0], slot[0]), min(first[1], slot[1])

    async def _turn_at(self, bus: Bus, run: str, moment: float) -> int:
        """Sequence of the first turn record after `moment`, the time of the oldest kept trajectory; 0 if there is none.
        Earlier records are not needed, because trajectories contain their turns."""
        async for received in bus.records("HR_TURN", TURN.where(run=run)):
            if received.time > moment:
                return received.seq
        return 0
