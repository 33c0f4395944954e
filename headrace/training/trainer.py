"""The trainer as a thing to hold: prepared or resumed, stepped, published. The actor around it only talks to the bus.

Folder of a run's trainer:
    checkpoint.safetensors   the newest durable state, replaced atomically
    mid-training.safetensors the same of mid-training, while that goes on
    policy/                  config.json and tokenizer.json of the run, written once
Nothing here knows streams: manifests and records come in, outcomes and files go out, and `position` is whatever the
caller wants to find again after a crash. All calls are blocking and belong into one worker thread.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepManifest
from headrace.policy import checkpoint as huggingface
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.moe import RoutesMissing
from headrace.policy.numerics import Numerics, probe
from headrace.policy.scoring import ScoringError
from headrace.policy.tokenizer import Tokenizer
from headrace.training import batch, checkpoint, mid_training
from headrace.training.guard import Guard
from headrace.training.mid_training import Progress, Trace
from headrace.training.mismatch import Measured, TooFar, answer, measure
from headrace.training.state import TrainerState
from headrace.training.step import StepOutcome, refuse, take
from headrace.weights import snapshot


class TrainerError(Exception):
    """The trainer cannot start as asked; the text says what is wrong."""


class Trainer:
    """State, kept versions and recipe of one run."""

    def __init__(self, config: Config, folder: Path, state: TrainerState, numerics: Numerics) -> None:
        """Use `prepare`."""
        self.config = config
        self.folder = folder
        self.state = state
        self.numerics = numerics
        self.kept: dict[int, Model] = {}
        """Earlier versions within the staleness bound; together with `state` that is bound + 1 of them."""
        self.reference: Model | None = None
        """Version 0, held only while `algorithm.kl_weight` > 0."""
        self.guard = Guard()
        """Watches for a collapse while `algorithm.guard_k1` > 0, or for engines that are too far off; see `guarded`."""
        self.position: Mapping[str, int | str] = {}
        """What the last `save` was given: where in the streams the trainer stood."""
        self.resumed = False

    @classmethod
    def prepare(
        cls,
        config: Config,
        folder: Path,
        *,
        tokenizer_json: str,
        traces: Callable[[], Iterable[Trace]],
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> "Trainer":
        """Resume from the folder's checkpoint, or make version 0: a new policy or a Hugging Face one, mid-trained.

        tokenizer_json: the run's tokenizer.json, kept beside config.json; a resumed run must bring the same text.
        traces: called when there is mid-training to do. TrainerError, CheckpointError or MidTrainingFailed say why not.
        """
        torch.set_num_threads(config.trainer.threads)
        policy = _policy(config, folder, tokenizer_json)
        numerics = probe(policy, exact=config.engine.exact)
        if config.engine.exact and not numerics.exact:
            raise TrainerError(f"exact mode was asked for and this machine cannot keep it: {numerics.reason}")
        file = folder / "checkpoint.safetensors"
        if file.exists():
            trainer = cls(config, folder, TrainerState(Model(policy, numerics, seed=None)), numerics)
            trainer._load(file)
            return trainer
        model = Model(policy, numerics, seed=config.run.seed)
        if config.policy.checkpoint:
            model.load_state(huggingface.load(config.policy.checkpoint)[1])
        if config.mid_training.tokens > 0:
            model.numerics = probe(policy, exact=False)  # nobody compares these numbers, and it is a fifth faster
            mid_training.run(model, traces(), config.mid_training, progress, kept=folder / "mid-training.safetensors")
            model.numerics = numerics
        trainer = cls(config, folder, TrainerState(model), numerics)
        trainer._hold_reference()
        trainer.save({})
        (folder / "mid-training.safetensors").unlink(missing_ok=True)
        return trainer

    @property
    def version(self) -> int:
        """Version of the current bytes; the next manifest's `version`."""
        return self.state.version

    @property
    def policy_folder(self) -> Path:
        """Where config.json and tokenizer.json of the run lie, for engines."""
        return self.folder / "policy"

    def step(
        self, manifest: StepManifest, trajectories: Mapping[int, Trajectory], scores: Mapping[int, Score]
    ) -> StepOutcome:
        """Take the step of a manifest; records are keyed by stream sequence. A pure function of state and arguments.

        A batch that cannot be trained on gives an outcome with `failed`; the version still moves on, with the old
        bytes. ValueError when the manifest is of another version: the caller's books are wrong.
        """
        if manifest.version != self.state.version:
            raise ValueError(f"the manifest updates version {manifest.version}, this is {self.state.version}")
        before = copy.deepcopy(self.state.model)
        models = {**self.kept, self.state.version: before}
        self.state.model.recompute = self.config.numerics.recompute
        self.state.model.plausible = self.config.numerics.replay_plausible
        measured = Measured()
        try:
            made = batch.build(manifest.groups, trajectories, scores)
            measured = measure(
                models,
                made,
                trajectories.values(),
                self.config.trainer.rescore,
                manifest.seed,
                self.numerics.fingerprint,
            )
            algorithm = answer(measured, self.config.numerics, self.config.algorithm)
            if self.guarded and algorithm.guard_k1 == 0.0:
                self.guard.keep(self.state, self.config.curriculum.staleness)
            outcome = take(
                self.state,
                made,
                algorithm=algorithm,
                micro_tokens=self.config.trainer.micro_tokens,
                bound=self.config.curriculum.staleness,
                rescored=measured.rescored,
                exact=self.numerics.exact and made.fingerprints <= {self.numerics.fingerprint},
                reference=self.reference,
                guard=self.guard,
            )
        except batch.BatchError as error:
            outcome = refuse(self.state, "bad_batch", str(error))
        except RoutesMissing as error:
            outcome = refuse(self.state, "routes_missing", str(error))
        except ScoringError as error:
            outcome = refuse(self.state, "cannot_rescore", str(error))
        except TooFar as error:
            outcome = self._too_far(str(error))
        outcome = dataclasses.replace(outcome, engines=measured.engines, alarm=measured.alarm(self.config.numerics))
        keep = int(manifest.objective.get("keep_versions", 0))  # more than the bound while that is growing
        oldest = self.state.version - max(keep, self.config.curriculum.staleness)
        self.kept = {version: model for version, model in models.items() if version >= oldest}
        return outcome

    @property
    def guarded(self) -> bool:
        """Whether earlier versions are held to go back to."""
        return self.config.algorithm.guard_k1 > 0.0 or self.config.numerics.on_mismatch == "roll_back"

    def _too_far(self, said: str) -> StepOutcome:
        """The outcome of a batch whose engines are above a limit: the old bytes, or those of the last good version."""
        if self.config.numerics.on_mismatch != "roll_back":
            return refuse(self.state, "mismatch_over_limit", said)
        restored = self.guard.roll_back(self.state, self.config.algorithm, slower=False)
        where = f"back to version {restored}" if restored >= 0 else "no good version is held yet"
        return dataclasses.replace(refuse(self.state, "mismatch_over_limit", f"{said}; {where}"), restored=restored)

    def publish(self, path: Path) -> str:
        """Write the served bytes as one safetensors file, whole or not at all; returns their state hash."""
        return snapshot.write(path, self.state.published())

    def save(self, position: Mapping[str, int | str]) -> None:
        """Replace the checkpoint durably; after it returned, nothing before `position` is needed again."""
        kept = {version: model.state() for version, model in self.kept.items()}
        if self.reference is not None:
            kept[-1] = self.reference.state()
        guard = self.guard if self.guarded else None
        file = self.folder / "checkpoint.safetensors"
        checkpoint.save(file, self.state, kept=kept, position=position, guard=guard)
        self.position = dict(position)

    def _hold_reference(self) -> None:
        if self.config.algorithm.kl_weight > 0.0:
            self.reference = copy.deepcopy(self.state.model)

    def _load(self, file: Path) -> None:
        found = checkpoint.load(file, self.state)
        for version, tensors in found.kept.items():
            model = Model(self.state.model.config, self.numerics, seed=None)
            model.load_state(tensors)
            if version < 0:
                self.reference = model
            else:
                self.kept[version] = model
        if self.config.algorithm.kl_weight > 0.0 and self.reference is None:
            raise TrainerError(f"{file} holds no reference policy, and kl_weight > 0 needs one")
        self.guard = found.guard or Guard()
        self.position, self.resumed = found.position, True


def _policy(config: Config, folder: Path, tokenizer_json: str) -> PolicyConfig:
    """The run's policy config, written with its tokenizer on the first start and compared on later ones."""
    policy = PolicyConfig.from_section(config.policy)
    size = len(Tokenizer.parse(tokenizer_json))
    if size > policy.vocab:
        raise TrainerError(f"the tokenizer has {size} ids, the policy's vocabulary only {policy.vocab}")
    wanted = {"config.json": json.dumps(policy.to_hf(), indent=2) + "\n", "tokenizer.json": tokenizer_json}
    target = folder / "policy"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        file = target / name
        if not file.exists():
            part = file.with_name(f".{name}.part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, file)
        elif file.read_text(encoding="utf-8") != text:
            raise TrainerError(f"{file} is of another policy than this run's; a run keeps its policy and tokenizer")
    return policy
