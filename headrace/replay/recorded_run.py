"""A run's recorded steps, whether they come from its streams and folder or from a bundle.

A replay reads four things and nothing else: the manifests, their outcomes, a checkpoint at or before the step, and the
records that a manifest names.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.replay.fetching import Records, fetch

Outcome = StepDone | StepFailed


class ReplayError(HeadraceError):
    """The step or run cannot be replayed; the text names the missing part."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The recorded steps of a run, with readers for their records."""

    run: str
    config: Config
    tokenizer: str
    """Text of the run's tokenizer.json."""
    manifests: Mapping[int, StepManifest]
    """By step: the manifest that its outcome names. Of several manifests, the newest that has an outcome."""
    outcomes: Mapping[int, Outcome]
    checkpoints: Mapping[int, Path]
    """By version."""
    fetch: Callable[[StepManifest], Awaitable[Records]]

    def finished(self, step: int) -> tuple[StepManifest, Outcome]:
        """Manifest and outcome of a step. ReplayError when it has none."""
        if step not in self.manifests:
            have = f"{min(self.manifests)} to {max(self.manifests)}" if self.manifests else "none"
            raise ReplayError(f"run {self.run} has no finished step {step}; it has {have}")
        return self.manifests[step], self.outcomes[step]

    def nearest(self, step: int) -> int:
        """The newest version, at or before a step, whose checkpoint is kept. ReplayError when there is none."""
        fitting = [version for version in self.checkpoints if version <= step]
        if not fitting:
            have = f"the oldest is of version {min(self.checkpoints)}" if self.checkpoints else "there is none"
            raise ReplayError(f"run {self.run} keeps no checkpoint of version {step} or before; {have}")
        return max(fitting)

    def kept(self) -> list[int]:
        """Finished steps that can be replayed from a checkpoint through records that still exist, in order."""
        newest = max(self.checkpoints, default=0)
        keep = max(self.config.replay.keep_steps, self.config.curriculum.staleness + 2)
        first = min((version for version in self.checkpoints if version >= newest - keep), default=newest)
        return sorted(step for step in self.manifests if step >= first)

    async def records(self, manifest: StepManifest) -> Records:
        """Trajectories and scores of a manifest. ReplayError when some were purged, which is not a failed step."""
        trajectories, scores = await self.fetch(manifest)
        for group in manifest.groups:
            for trajectory, score in group.slots:
                if trajectory not in trajectories or score not in scores:
                    raise ReplayError(
                        f"purged: group {group.group} of step {manifest.step} is not in the streams any more"
                    )
        return trajectories, scores


async def of_run(bus: Bus, config: Config, folder: Path, run: str) -> RecordedRun:
    """A run's recorded steps from its streams. folder: of the run, for tokenizer and checkpoints. ReplayError."""
    by_seq: dict[int, StepManifest] = {}
    manifests: dict[int, StepManifest] = {}
    outcomes: dict[int, Outcome] = {}
    async for received in bus.history("HR_STEP", STEP.at(run=run)):
        record = received.message
        if isinstance(record, StepManifest):
            by_seq[received.seq] = record
        elif isinstance(record, StepDone | StepFailed) and record.manifest_seq in by_seq:
            manifests[record.step], outcomes[record.step] = by_seq[record.manifest_seq], record
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ReplayError(f"{folder / 'tokenizer.json'} cannot be read: {error.strerror}") from None
    files = (folder / "checkpoints").glob("v*.safetensors")
    return RecordedRun(
        run=run,
        config=config,
        tokenizer=text,
        manifests=manifests,
        outcomes=outcomes,
        checkpoints={int(file.name[1:9]): file for file in files},
        fetch=lambda manifest: fetch(bus, manifest.groups),
    )
