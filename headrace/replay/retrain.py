"""Trains a second policy on a recorded run's batches: the same batches in the same order, another objective, no
rollouts.

It reads the manifests that the run's own trainer wrote, also while that trainer still writes them, and publishes
nothing: its weights and figures go to a folder of its own. Tokens keep the log-probabilities of the policy that sampled
them, so importance weights stay correct while the difference between the two policies grows; k1 measures it.

Trade-off: the records were sampled by the run's policy, so this is off-policy learning, and the two policies differ
more with each step. This trainer does not have the versions that sampled the records, so it cannot score them again
with those (no `max_abs_dlp`). It also tries the steps that failed in the first trainer.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.training import StepManifest
from headrace.replay.recipe import in_layout
from headrace.replay.recorded_run import RecordedRun, ReplayError
from headrace.replay.step import Loaded, attempt
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer

Scores = Mapping[tuple[str, int, int], Score]


class SecondStep(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `headrace retrain`."""

    step: int
    version: int
    failed: str
    loss: float
    grad_norm: float
    reward_mean: float
    pass_rate: float
    k1: float
    """k1 between sampler and this trainer, in nats per token."""
    entropy: float
    weights_hash: str
    same_weights: bool
    """Whether the weights equal those that the run's own trainer published for this step."""


class SecondTrainer:
    """A trainer in a folder of its own; it resumes from its checkpoint."""

    def __init__(
        self,
        recorded: RecordedRun,
        config: Config,
        folder: Path,
        scores: Scores | None = None,
        more: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """config: the run's configuration with another objective. scores: those of another judge, used instead of the
        recorded ones. more: waits for further scores of that judge; without it a missing score is an error."""
        self.recorded, self.folder, self.scores, self.more = recorded, folder, scores, more
        trainer = msgspec.structs.replace(config.trainer, rescore=0)
        self.config = in_layout(msgspec.structs.replace(config, trainer=trainer))

    def open(self) -> PolicyTrainer:
        """Resume the folder's checkpoint, or start from the run's first one that is kept. ReplayError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self.folder / "checkpoint.safetensors"
        if not checkpoint.exists():
            if not self.recorded.checkpoints:
                raise ReplayError(f"run {self.recorded.run} keeps no checkpoint to start from")
            shutil.copyfile(self.recorded.checkpoints[min(self.recorded.checkpoints)], checkpoint)
        trainer = PolicyTrainer.prepare(self.config, self.folder, tokenizer_json=self.recorded.tokenizer, traces=tuple)
        if trainer.config.algorithm.kl_weight > 0.0 and trainer.reference is None and trainer.version == 0:
            trainer.reference = trainer.state.model
        return trainer

    async def steps(self, manifests: AsyncIterator[StepManifest], count: int = 0) -> AsyncIterator[SecondStep]:
        """Take the batches of `manifests`, up to `count` of them (0: all); a checkpoint after each. ReplayError."""
        trainer = await asyncio.to_thread(self.open)
        taken = 0
        async for manifest in manifests:
            if manifest.version < trainer.version:
                continue
            if manifest.version > trainer.version:
                raise ReplayError(f"batch {trainer.version} is missing: the next manifest is of {manifest.version}")
            trajectories, scores = await self.recorded.records(manifest)
            if self.scores is not None:
                scores = {seq: await self._other(score) for seq, score in scores.items()}
            published = self.recorded.outcomes.get(manifest.step)
            loaded = Loaded(trainer, manifest, published, trajectories, scores)  # type: ignore[arg-type]
            result = await asyncio.to_thread(attempt, loaded)
            await asyncio.to_thread(trainer.save, {"step": manifest.step})
            yield line(manifest.step, result, published is not None and published.state_hash == result.state_hash)
            taken += 1
            if taken == count:
                return

    async def _other(self, score: Score) -> Score:
        assert self.scores is not None
        attempt_key = (score.group, score.slot, score.attempt)
        while (other := self.scores.get(attempt_key)) is None and self.more is not None:
            await self.more()
        if other is None:
            raise ReplayError(f"{score.group} slot {score.slot} was not judged again: judge the whole run first")
        return other


def line(step: int, result: StepOutcome, same: bool) -> SecondStep:
    """The report of one step."""
    figures = msgspec.structs.asdict(result)
    return SecondStep(
        step=step,
        weights_hash=result.state_hash,
        same_weights=same,
        **{name: figures[name] for name in SecondStep.__struct_fields__ if name in figures and name != "step"},
    )
