"""A second trainer on a recorded river: the same batches in the same order, another objective, no new rollouts.

It reads the manifests that the run's own trainer wrote, from the first or live behind it, and writes nothing on the
bus: its weights and figures are its own folder's. Tokens keep the log-probabilities of the policy that sampled them, so
importance weights stay true while the two policies drift apart; k1 says how far they have.

What it gives up: the records were sampled by the run's policy, so this is learning from another's experience, further
off-policy with each step; and they cannot be scored again by the versions that wrote them, which it does not have (no
`max_abs_dlp`). A step that the first trainer could not take is tried here all the same.
"""

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.training import StepManifest
from headrace.replay.past import Past, ReplayError
from headrace.replay.step import Loaded, attempt
from headrace.training.step import StepOutcome
from headrace.training.trainer import Trainer

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
    """Sampler against this trainer, nats a token."""
    entropy: float
    weights_hash: str
    same_weights: bool
    """The run's own trainer has these very weights: so it is for as long as nothing differs."""


class SecondTrainer:
    """A trainer in a folder of its own, which goes on where it was left."""

    def __init__(
        self,
        past: Past,
        config: Config,
        folder: Path,
        scores: Scores | None = None,
        more: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """config: with the other objective. scores: of another judge, in place of the recorded ones. more: waits for
        further ones while that judge is at work; without it a missing one is an error."""
        self.past, self.folder, self.scores, self.more = past, folder, scores, more
        trainer = msgspec.structs.replace(config.trainer, rescore=0)
        self.config = msgspec.structs.replace(config, trainer=trainer)

    def open(self) -> Trainer:
        """Resume the folder's checkpoint, or start from the run's first one that is kept. ReplayError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self.folder / "checkpoint.safetensors"
        if not checkpoint.exists():
            if not self.past.checkpoints:
                raise ReplayError(f"run {self.past.run} keeps no checkpoint to start from")
            shutil.copyfile(self.past.checkpoints[min(self.past.checkpoints)], checkpoint)
        machine = Trainer.prepare(self.config, self.folder, tokenizer_json=self.past.tokenizer, traces=tuple)
        if machine.config.algorithm.kl_weight > 0.0 and machine.reference is None and machine.version == 0:
            machine.reference = machine.state.model
        return machine

    async def steps(self, manifests: AsyncIterator[StepManifest], count: int = 0) -> AsyncIterator[SecondStep]:
        """Take the batches of `manifests`, up to `count` of them (0: all); a checkpoint after each. ReplayError."""
        machine = await asyncio.to_thread(self.open)
        taken = 0
        async for manifest in manifests:
            if manifest.version < machine.version:
                continue
            if manifest.version > machine.version:
                raise ReplayError(f"batch {machine.version} is missing: the next manifest is of {manifest.version}")
            trajectories, scores = await self.past.records(manifest)
            if self.scores is not None:
                scores = {seq: await self._other(score) for seq, score in scores.items()}
            known = self.past.outcomes.get(manifest.step)
            loaded = Loaded(machine, manifest, known, trajectories, scores)  # type: ignore[arg-type]
            result = await asyncio.to_thread(attempt, loaded)
            await asyncio.to_thread(machine.save, {"step": manifest.step})
            yield line(manifest.step, result, known is not None and known.state_hash == result.state_hash)
            taken += 1
            if taken == count:
                return

    async def _other(self, score: Score) -> Score:
        assert self.scores is not None
        place = (score.group, score.slot, score.attempt)
        while (found := self.scores.get(place)) is None and self.more is not None:
            await self.more()
        if found is None:
            raise ReplayError(f"{score.group} slot {score.slot} was not judged again: judge the whole run first")
        return found


def line(step: int, result: StepOutcome, same: bool) -> SecondStep:
    """What a step's line says."""
    figures = dataclasses.asdict(result)
    return SecondStep(
        step=step,
        weights_hash=result.state_hash,
        same_weights=same,
        **{name: figures[name] for name in SecondStep.__struct_fields__ if name in figures and name != "step"},
    )
