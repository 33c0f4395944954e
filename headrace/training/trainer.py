"""One run's trainer without the bus: it prepares or resumes, takes steps and publishes. `actors.trainer` calls it.

Folder of a run's trainer:
    checkpoint.safetensors   the newest durable state, replaced atomically
    mid-training.safetensors the same for mid-training, while it runs
    policy/                  config.json and tokenizer.json of the run, written once
This module knows no streams: it takes manifests and records and returns outcomes and files. `position` is a mapping
that the caller saves and gets back after a crash. All calls block; make them in one worker thread.
"""

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from headrace.algorithms import losses
from headrace.algorithms.advantages import Advantage
from headrace.algorithms.registry import ADVANTAGES, LOSSES
from headrace.config import Algorithm, Config
from headrace.messages.judging import Score
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import Trajectory
from headrace.messages.training import LeftOut, RankLayout, StepManifest
from headrace.policy.config import PolicyConfig
from headrace.policy.device import select
from headrace.policy.layout import hugging_face
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.policy.scoring import ScoringError
from headrace.policy.seam import PolicyModel
from headrace.registry import PluginError, differing, plugins
from headrace.rendering.tokenizer import Tokenizer
from headrace.training import checkpoint, mid_training
from headrace.training.batches import batch
from headrace.training.batches.ahead import Ahead
from headrace.training.batches.micro_batch import device_of
from headrace.training.batches.segment import BatchError
from headrace.training.device import TrainerError, check_device, check_exact, device_named, planned
from headrace.training.figures.clock import Clock, Pause
from headrace.training.figures.memory import Peak, without_policy
from headrace.training.figures.peaks import peak_flops
from headrace.training.figures.work import Work, thread, work_of
from headrace.training.gradient import Helpers, Recipe, in_order, nothing
from headrace.training.guard import Guard
from headrace.training.mid_training import Progress, Trace
from headrace.training.mismatch import Measured, TooFar, answer, measure
from headrace.training.outcome import StepOutcome, refuse
from headrace.training.parallel.interface import SINGLE_PROCESS, DataParallel, Others
from headrace.training.schedule import optimizer_settings
from headrace.training.served import precision
from headrace.training.served.publication import Publication
from headrace.training.served.versions import Log, Versions, adapters, trained
from headrace.training.state import TrainerState, freeze
from headrace.training.step import take
from headrace.weights import tensor_state


class PolicyTrainer:
    """State, kept versions and recipe of one run."""

    def __init__(self, config: Config, folder: Path, state: TrainerState, numerics: Numerics) -> None:
        """Use `prepare`."""
        self.config = config
        self.folder = folder
        self.state = state
        self.numerics = numerics
        self.versions = Versions(state.model, state.version)
        """The current version and the earlier ones within the staleness bound: bound + 1 of them."""
        self._new_log()
        self.reference: PolicyModel | None = None
        """Version 0, held only while `algorithm.kl_weight` > 0."""
        self.guard = Guard()
        """Detects a collapse while `algorithm.guard_k1` > 0; rolls back when engines exceed a limit (`guarded`)."""
        self.position: Mapping[str, int | str] = {}
        """The argument of the last `save`: the trainer's position in the streams."""
        self.resumed = False
        self.data_parallel: DataParallel = SINGLE_PROCESS
        self.others: Others | None = None
        """The other processes of this trainer, in the first of several while they run."""
        self.clock = Clock()
        self.planned_bytes = 0
        """The memory plan of this process's device."""
        self.ahead = Ahead(config.trainer.threads)
        self._beside = thread(config.trainer.threads)

    @classmethod
    def prepare(
        cls,
        config: Config,
        folder: Path,
        *,
        tokenizer_json: str,
        traces: Callable[[], Iterable[Trace]],
        progress: Callable[[Progress], None] = lambda _: None,
        base: Path | None = None,
    ) -> "PolicyTrainer":
        """Resume from the folder's checkpoint, or make version 0: a new or a Hugging Face policy, after mid-training.

        tokenizer_json: the text of the run's tokenizer.json; a resumed run must pass the same text.
        base: a snapshot file with the bytes of version 0, instead of a new or a mid-trained policy.
        traces: called when mid-training is configured. Raises TrainerError, CheckpointError or MidTrainingFailed.
        """
        torch.set_num_threads(config.trainer.threads)
        device = device_named(config.trainer.device)
        select(device)
        policy = cls.prepare_files(config, folder, tokenizer_json=tokenizer_json)
        numerics = probe(policy, exact=config.engine.exact, device=device)
        check_exact(config, numerics)
        settings, offload = optimizer_settings(config.algorithm), config.trainer.offload == "optimizer"
        file = folder / "checkpoint.safetensors"
        if file.exists():
            model = precision.served_as(config, freeze(build(policy, numerics), config.trainer.frozen).to(device))
            trainer = cls(config, folder, TrainerState(model, settings=settings, offload=offload), numerics)
            trainer.planned_bytes = planned(config, policy, device).total
            trainer._load(file)
            return trainer
        model = build(policy, numerics, seed=config.run.seed)
        if base is not None:
            model.load_state(adapters(model) | tensor_state.read(base))
        elif config.policy.checkpoint:
            model.load(config.policy.checkpoint)
        freeze(model, config.trainer.frozen).to(device)
        if config.mid_training.tokens > 0 and base is None:
            model.numerics = probe(policy, exact=False, device=device)  # a fifth faster; no bits are compared
            file = folder / mid_training.FILE
            mid_training.run(model, traces(), config.mid_training, progress, file=file, offload=offload)
            model.numerics = numerics
        state = TrainerState(precision.served_as(config, model), settings=settings, offload=offload)
        trainer = cls(config, folder, state, numerics)
        trainer.planned_bytes = planned(config, policy, device).total
        trainer._hold_reference()
        trainer.save({})
        (folder / mid_training.FILE).unlink(missing_ok=True)
        return trainer

    @staticmethod
    def prepare_files(config: Config, folder: Path, *, tokenizer_json: str) -> PolicyConfig:
        """Check plugins, device and memory, and write config.json and tokenizer.json. TrainerError, CheckpointError."""
        without_policy()
        plugins_of(config.algorithm)
        policy, device = _policy(config, folder, tokenizer_json), device_named(config.trainer.device)
        check_device(config, planned(config, policy, device), device)
        return policy

    def close(self) -> None:
        """Finish the open publication and end its threads; in a group also the other processes."""
        self.state.settle(end=True)
        self._beside.shutdown()
        self.ahead.close()

    @property
    def version(self) -> int:
        """Version of the current bytes; the next manifest's `version`."""
        return self.state.version

    @property
    def layout(self) -> RankLayout | None:
        """The processes of this trainer; None: this one alone."""
        return None

    @property
    def ended(self) -> bool:
        """Whether this trainer can take no other step, because a process of its group has ended."""
        return False

    @property
    def policy_folder(self) -> Path:
        """The folder with config.json and tokenizer.json of the run, for engines."""
        return self.folder / "policy"

    def step(
        self,
        manifest: StepManifest,
        trajectories: Mapping[int, Trajectory],
        scores: Mapping[int, Score],
        before_update: Callable[[], None] = nothing,
        hashed: bool = True,
        before_forward: Callable[[], None] = nothing,
    ) -> StepOutcome:
        """Take a manifest's step; records are keyed by stream sequence. The result depends on state and arguments only.

        before_update: called before any change of the state that the next version depends on; its errors end the step.
        hashed: False leaves the outcome's state hash empty; `publish` computes it while it copies. before_forward:
        called before the first forward pass, and possibly before later ones.
        Attempts that cannot be trained on are left out (`batch.build`). A batch that cannot be trained on gives an
        outcome with `failed`; the version still grows by one, with the old bytes. ValueError when the manifest updates
        another version than the current one. TrainerError when a plugin here differs from the manifest's (Law 4).
        """
        if manifest.version != self.state.version:
            raise ValueError(f"the manifest updates version {manifest.version}, this is {self.state.version}")
        # Plugins that produced the batch's records need not be on this node: the step only reads the records.
        executed = [plugin for plugin in manifest.plugins if plugin.seam in STEP_SEAMS]
        if why := differing(executed, plugins_of(self.config.algorithm)):
            raise TrainerError(why)
        self.state.model.recompute = self.config.numerics.recompute
        self.state.model.plausible = self.config.numerics.replay_plausible
        self.state.configure(optimizer_settings(self.config.algorithm))
        built = self.ahead.take(seq for group in manifest.groups for seq, _ in group.slots)
        device = device_of(self.state.model)
        measured, pause, peak = Measured(), Pause(self.state.updated_at, self.clock), Peak(device)
        self.state.updated_at = None
        begins = in_order(pause.end, self.state.copy, before_forward)
        work: Callable[[], Work] = Work
        left_out: tuple[LeftOut, ...] = ()
        try:
            if manifest.restore >= 0:
                raise RolledBack
            advantage = advantage_of(self.config.algorithm)
            by_class = self.config.algorithm.baseline == "class"
            shape, exact = self.state.model.config, self.numerics.exact
            made = batch.build(
                manifest.groups, trajectories, scores, advantage, by_class=by_class, built=built, policy=shape
            )
            left_out = made.left_out
            work = self._beside.submit(work_of, self.config, shape, made, manifest.seed, exact).result
            if self.config.trainer.rescore:
                begins()
            with self.clock.spent("rescore"):
                measured = measure(
                    self.versions,
                    made,
                    trajectories.values(),
                    self.config.trainer.rescore,
                    manifest.seed,
                    self.numerics.fingerprint,
                )
                self.versions.release()
            algorithm = answer(measured, self.config.numerics, self.config.algorithm)
            if self.guarded and algorithm.guard_k1 == 0.0:
                self.guard.keep(self.state, self.config.curriculum.staleness)
            section = self.config.trainer
            recipe = Recipe(algorithm, section.micro_tokens, self.config.curriculum.staleness)
            helpers = Helpers(self.reference, self.data_parallel, begins, in_order(before_update, work), hashed)
            outcome = take(self.state, made, recipe, self.guard, helpers)
            outcome = msgspec.structs.replace(outcome, exact=exact and made.fingerprints <= {self.numerics.fingerprint})
        except BatchError as error:
            outcome = refuse(self.state, "bad_batch", str(error), hashed=hashed)
        except ScoringError as error:
            outcome = refuse(self.state, "cannot_rescore", str(error), hashed=hashed)
        except TooFar as error:
            before_update()
            outcome = self._too_far(str(error), hashed)
        except RolledBack:
            before_update()
            outcome = self._roll_back(manifest.restore, hashed)
        before_update()
        keep = int(manifest.objective.get("keep_versions", 0))  # more than the bound while the bound is growing
        self._advance(max(keep, self.config.curriculum.staleness))
        return msgspec.structs.replace(
            outcome,
            max_abs_dlp=measured.rescored.max_abs_dlp,
            rescored_tokens=measured.rescored.tokens,
            engines=measured.engines,
            gaps=measured.gaps,
            alarm=measured.alarm(self.config.numerics),
            left_out=left_out,
            work=work(),
            between_s=pause.seconds,
            peak_flops=peak_flops(self.config, self.state.model.config, device),
            peak_bytes=peak.bytes,
            planned_bytes=self.planned_bytes,
        )

    def expect(self, trajectories: Mapping[int, Trajectory]) -> None:
        """Build the tensors of records whose step comes later, beside other work; keyed by stream sequence."""
        self.ahead.add(trajectories)

    def give_up(self, reason: str, detail: str, *, hashed: bool = True) -> StepOutcome:
        """The outcome of a step that raised before it changed the state: the next version, with the old bytes."""
        outcome = refuse(self.state, reason, detail, hashed=hashed)
        self._advance(self.config.curriculum.staleness)
        return outcome

    def _advance(self, bound: int) -> None:
        """Keep the versions whose tokens the next batch may hold."""
        self.versions.advance(self.state.version, self._new_log())
        discarded = self.versions.keep(self.state.version - (bound if self.config.trainer.rescore else 0))
        self._beside.submit(discarded.clear)  # freeing gigabytes takes longer than the pause between two steps may

    def _new_log(self) -> Log:
        """Begin a log of undo entries, which only re-scoring reads; the one before."""
        if self.config.trainer.rescore:
            return self.state.new_log()
        self.state.log = None
        return Log()

    @property
    def guarded(self) -> bool:
        """Whether earlier states are kept for a rollback."""
        return self.config.algorithm.guard_k1 > 0.0 or self.config.numerics.on_mismatch == "roll_back"

    def _too_far(self, said: str, hashed: bool) -> StepOutcome:
        """The outcome of a batch whose engines exceed a limit: the old bytes, or those of the last good version."""
        if self.config.numerics.on_mismatch != "roll_back":
            return refuse(self.state, "mismatch_over_limit", said, hashed=hashed)
        restored = self.guard.roll_back(self.state, self.config.algorithm, slower=False)
        where = f"back to version {restored}" if restored >= 0 else "no good version is held yet"
        outcome = refuse(self.state, "mismatch_over_limit", f"{said}; {where}", hashed=hashed)
        return msgspec.structs.replace(outcome, restored=restored)

    def _roll_back(self, to: int, hashed: bool) -> StepOutcome:
        """The outcome of an order: weights and optimizer of an earlier version, whose checkpoint this folder keeps."""
        newest = self.state.version
        self._restore(self.folder / f"v{to:08d}.safetensors")
        self.state.version = newest
        self.guard.taken_back(to, newest)
        outcome = refuse(self.state, "rolled_back", f"back to version {to}, as ordered", hashed=hashed)
        return msgspec.structs.replace(outcome, restored=to)

    def _restore(self, file: Path) -> None:
        checkpoint.load(file, self.state)

    @property
    def saved_guard(self) -> Guard | None:
        """The guard where later steps depend on it."""
        return self.guard if self.guarded or self.guard.discarded else None

    def publish(self, folder: Path) -> Publication:
        """Begin to write the served bytes as a file of `folder`, behind the next step. See `served.publication`."""
        return self.state.publish(folder)

    def explained(self, error: Exception) -> Exception:
        """The error to report when a publication failed with this one. Waits until its cause is known."""
        return error

    def save(self, position: Mapping[str, int | str]) -> None:
        """Replace the checkpoint durably; after it returns, records before `position` are not needed again."""
        earlier = {version: trained(self.versions[version]) for version in self.versions.earlier}
        self.versions.release()
        if self.reference is not None:
            earlier[-1] = trained(self.reference)
        file = self.folder / "checkpoint.safetensors"
        checkpoint.save(file, self.state, kept=earlier, position=position, guard=self.saved_guard)
        self.position = dict(position)

    def _hold_reference(self) -> None:
        if self.config.algorithm.kl_weight > 0.0:
            self.reference = copy.deepcopy(self.state.model)

    def _load(self, file: Path) -> None:
        """Restore state, kept versions, reference, guard and position from a checkpoint. CheckpointError,
        TrainerError."""
        contents = checkpoint.load(file, self.state)
        self._new_log()
        self.versions = Versions(self.state.model, self.state.version)
        later = self.state.model
        for version in sorted(contents.kept, reverse=True):
            model = copy.deepcopy(self.state.model)
            model.load_state({**model.state(), **contents.kept[version]})
            if version < 0:
                self.reference = model
            else:
                self.versions.restore(version, dict(model.named_parameters()), dict(later.named_parameters()))
                later = model
        if self.config.algorithm.kl_weight > 0.0 and self.reference is None:
            raise TrainerError(f"{file} holds no reference policy, and kl_weight > 0 needs one")
        self.guard = contents.guard or Guard()
        self.position, self.resumed = contents.position, True


class RolledBack(Exception):
    """The step's manifest restores a version instead of training."""


STEP_SEAMS = (ADVANTAGES.seam, LOSSES.seam)
"""The seams whose plugins a step executes."""


def advantage_of(algorithm: Algorithm) -> Advantage:
    """The advantage with its options. PluginError."""
    return ADVANTAGES.bound(algorithm.advantage, algorithm.options.advantage, "algorithm.options.advantage")


def plugins_of(algorithm: Algorithm) -> tuple[Plugin, ...]:
    """The plugins that a step uses; built-ins are left out. TrainerError for a name that no registry has, and for
    options that such a part does not take."""
    try:
        advantage_of(algorithm)
        LOSSES.bound(algorithm.weighting, algorithm.options.loss, losses.OPTIONS)
        return plugins((ADVANTAGES, [algorithm.advantage]), (LOSSES, [algorithm.weighting]))
    except PluginError as error:
        raise TrainerError(str(error)) from None


def _policy(config: Config, folder: Path, tokenizer_json: str) -> PolicyConfig:
    """The run's policy config. The first start writes it with the tokenizer; later starts compare them.
    TrainerError."""
    policy = hugging_face.of_run(config)
    size = len(Tokenizer.parse(tokenizer_json))
    if size > policy.vocab:
        raise TrainerError(
            f"the tokenizer has {size} ids, expected at most [policy] vocab = {policy.vocab}; raise vocab"
        )
    wanted = {
        "config.json": json.dumps(hugging_face.as_json(policy), indent=2) + "\n",
        "tokenizer.json": tokenizer_json,
    }
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
