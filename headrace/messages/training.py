"""A training step as a pure function of recorded streams: its inputs and its outcome."""

import math

import msgspec

from headrace.messages.base import Array, Count, Finite, Message, Name, Seed, Share, Version, message
from headrace.messages.plugins import Plugin


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch: the sequence of its closing, and the sequences (trajectory, score) of each slot."""

    group: Name
    close_seq: Count
    slots: tuple[tuple[Count, Count], ...]


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that compute a step together. A sum's order follows from them, so equal layouts give equal bits."""

    ranks: Count
    """Number of all processes."""
    nodes: Count
    """Copies of the weights, each in shards over ranks / nodes processes."""
    expert_ranks: Count
    context_ranks: Count
    backend: str
    """Of the sums: gloo on CPUs, nccl on CUDA devices."""
    torch: str
    """Its version."""
    nccl: str = ""
    """Its version; empty with gloo, and so are the next two."""
    nccl_algo: str = ""
    """NCCL_ALGO of the first process; empty where NCCL chooses."""
    nccl_proto: str = ""
    """NCCL_PROTO of the first process; empty where NCCL chooses."""


@message("step_manifest")
class StepManifest(Message, frozen=True, kw_only=True):
    """All inputs of a step, stored before it runs. Executing it again in the same layout gives the same bits."""

    run: str
    step: Count
    """Batch number k; the step turns version k into version k + 1."""
    incarnation: Count = 0
    version: Count
    base_hash: str
    groups: tuple[BatchGroup, ...]
    seed: Seed
    code: str
    """Version of the package, and the git revision where there is one."""
    fingerprint: str
    objective: dict[str, float | int | str | bool] = {}
    layout: RankLayout | None = None
    """None: one process."""
    plugins: tuple[Plugin, ...] = ()
    """The plugins that the step depends on: its advantage and loss, and the plugins that its Scores and Trajectories
    name. A node where the advantage or the loss has another source hash refuses the step; a trainer
    refuses a batch that names another source than the run's record in HR_PLUGINS."""
    bytes: Count = 0
    """Of the batch's records at the broker, for their retention; 0 where it is not known."""
    turn_seq: Count = 0
    """First record in HR_TURN of the batch's trajectories whose routes are there; 0 for none."""
    orders: Count = 0
    """Sequence in HR_EVENT of the newest TrainerOrder that the trainer followed in this step or before; 0 for none."""
    ordered: dict[str, float | int | str | bool] = {}
    """The settings of `objective` that orders have changed since the run began."""
    restore: Version = -1
    """By an order the step trains on nothing: weights and optimizer go back to this version's; -1 otherwise."""


@message("trainer_order")
class TrainerOrder(Message, frozen=True, kw_only=True):
    """An operator's order that the trainer's next manifest follows: other settings, or an earlier version."""

    run: str
    settings: dict[str, float | int | str | bool] = {}
    """Names of [algorithm] to their new values."""
    restore: Version = -1
    """The version whose weights and optimizer become the next version's; -1 for none."""


@message("records_purged")
class RecordsPurged(Message, frozen=True, kw_only=True):
    """The trainer is about to delete records of steps that are no longer kept for replay."""

    run: str
    step: Count
    """The oldest step that is kept."""
    trajectory_seq: Count
    """In HR_TRAJ, the first record that is kept."""
    score_seq: Count
    """The same for scores in HR_SCORE."""


class EngineMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between sampler and trainer over re-scored tokens of one engine, under the weights that wrote
    them."""

    engine: str
    """Id of the engine's rollout actor."""
    fingerprint: str
    same_fingerprint: bool
    """Whether the engine has the trainer's fingerprint: in exact mode every figure below is then 0."""
    tokens: Count = 0
    k1: float = 0.0
    k3: float = 0.0
    max_abs_dlp: float = 0.0
    differ: float = 0.0
    """Share of tokens whose two log-probabilities are not equal."""
    flips: float = 0.0
    """Share of token-layers that the trainer would route to other experts."""


class TokenGap(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer minus sampler log-probability of one re-scored trajectory's sampled tokens."""

    trajectory: str
    """Id of the Trajectory."""
    engine: str
    tokens: Count
    """Re-scored tokens: all that the trajectory sampled."""
    gaps: Array | None = None
    """float32: the first of them (`GAPS_KEPT` of `training.mismatch`), segment by segment; None where all are 0."""


@message("token_gaps")
class TokenGaps(Message, frozen=True, kw_only=True):
    """The gaps of a step's re-scored trajectories, for the page of an attempt. Users' trajectories are left out."""

    run: str
    step: Count
    of: tuple[TokenGap, ...]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a batch that a step did not train on."""

    trajectory_seq: Count
    """In HR_TRAJ, as the manifest names it."""
    reason: str
    """`bad_record`: no tensors can be made of its records; `logprobs_not_finite`; `routes_missing`: it has not the
    routes that the policy needs; `group_too_small`: fewer than two attempts of its group can be trained on."""
    detail: str


class StepFigures(Message, frozen=True, kw_only=True):
    """The figures of a step that was taken: what the trainer computes and `StepDone` publishes."""

    version: Count
    """The version that the step produced."""
    state_hash: str
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: Finite = 0.0
    reward_mean: float = 0.0
    turn_reward_mean: float | None = None
    """Mean over the turns of attempts whose reward gives each turn its own; None without any."""
    pass_rate: float = 0.0
    trained_slots: Count = 0
    left_out: tuple[LeftOut, ...] = ()
    """The other slots of the batch: neither the loss nor a baseline reads them."""
    tokens: Count = 0
    staleness: dict[str, Count] = {}
    """Staleness (k minus the version that wrote a token), as text, to number of sampled tokens."""
    staleness_max: Count = 0
    k1: float = 0.0
    k3: float = 0.0
    max_abs_dlp: float = math.nan
    """Largest |sampler - trainer| log-probability over the re-scored sample; NaN when none was re-scored."""
    rescored_tokens: Count = 0
    exact: bool = False
    """Sampler and trainer have one fingerprint in exact mode: `max_abs_dlp` must be 0."""
    entropy: float = 0.0
    clipped: float = 0.0
    """Share of computed tokens whose importance weight was cut."""
    dual_clipped: Share = 0.0
    """Share of computed tokens that `[algorithm] dual_clip` bounds, a part of `clipped`."""
    metrics: dict[str, float] = {}
    """The loss's own figures, means over the computed tokens."""
    seconds: Finite = 0.0
    engines: tuple[EngineMismatch, ...] = ()
    alarm: str = ""
    """Engines above a limit of [numerics] or with another fingerprint; empty when there is none."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step went, and the work that was done in it. The step's time runs from the end of the step
    before it to its own end, so it includes the checkpoint of the version before and the wait for that version's
    publication. In a group of processes `seconds` are those of the first one, and `collectives_s` those of all."""

    seconds: dict[str, Finite]
    """Seconds by cause; their sum is the step's wall time. busy: computing; batch: waiting for the batch; rescore:
    scoring trajectories again; straggler: waiting for a slower process; communication: collectives; publish:
    waiting until the version before is copied, and until its outcome and the step's manifest are written; checkpoint;
    records: reading records."""
    wall_s: Finite
    trained_tokens: Count = 0
    """Sampled tokens with a gradient."""
    forwarded_tokens: Count = 0
    """Inputs of every forward pass."""
    model_flops: Finite = 0.0
    """Predicted operations of one forward and one backward pass of the trained segments."""
    hardware_flops: Finite = 0.0
    """With re-scoring, proximal and reference policies, and recomputed activations."""
    peak_flops: Finite = 0.0
    """Operations per second that all devices could do; 0 where it is not known."""
    between_s: Finite = 0.0
    """Seconds from the update of the step before to this step's first forward pass, without the wait for the batch; 0
    where that step made no update."""
    expert_load: Finite = 0.0
    """Routed rows of the busiest expert over the mean expert's, of the worst layer; 0 without a mixture."""
    collectives_s: tuple[Finite, ...] = ()
    """Seconds in collectives of each process, in the order of ranks, without those before the step; empty for one
    process. A process that is slower than the others waits less, so the least of them is the communication, and what a
    process has more it waited for slower ones."""
    peak_bytes: Count = 0
    """Largest memory of a process in the step, of all processes the largest; 0 where it was not measured. On CUDA the
    bytes that torch allocated at once. On the CPU the growth of resident memory since before the policy was made, which
    also has records, code and freed memory."""
    planned_bytes: Count = 0
    """Bytes of the memory plan for each process: of live tensors. 0 in records of earlier versions of headrace."""

    @property
    def mfu(self) -> float | None:
        """Share of the peak that trained; None where the peak is not known."""
        return self.model_flops / (self.wall_s * self.peak_flops) if self.peak_flops and self.wall_s else None

    @property
    def hfu(self) -> float | None:
        """Share of the peak that computed; None where the peak is not known."""
        return self.hardware_flops / (self.wall_s * self.peak_flops) if self.peak_flops and self.wall_s else None

    @property
    def waits_s(self) -> tuple[float, ...]:
        """Seconds that each process waited for slower ones, in the order of ranks; empty for one process."""
        return tuple(seconds - min(self.collectives_s) for seconds in self.collectives_s)

    @property
    def peak_to_plan(self) -> float | None:
        """The peak of memory over the plan's; None where one of them is missing."""
        return self.peak_bytes / self.planned_bytes if self.peak_bytes and self.planned_bytes else None

    def figures(self) -> dict[str, float]:
        """Name to value, as reports, exporters and metrics show them. Those that are not known are left out."""
        wall = self.wall_s or 1.0
        named = {
            "trained_tokens_per_s": self.trained_tokens / wall,
            "forwarded_tokens_per_s": self.forwarded_tokens / wall,
            "expert_load": self.expert_load,
        }
        optional: dict[str, float | None] = {
            "mfu": self.mfu,
            "hfu": self.hfu,
            "peak_bytes": self.peak_bytes or None,
            "planned_bytes": self.planned_bytes or None,
            "peak_to_plan": self.peak_to_plan,
            "longest_collectives_s": max(self.collectives_s, default=None),
            "longest_straggler_s": max(self.waits_s, default=None),
        }
        told = {name: value for name, value in optional.items() if value is not None}
        return named | told | {f"{cause}_s": spent for cause, spent in self.seconds.items()}


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour in a step: means over its attempts that called a tool."""

    calls_per_turn: Finite
    """Calls per turn that has a call."""
    reads_before_edit: Finite
    """Reads and searches before the first edit."""
    tested: Finite
    """Share of attempts that ran the tests after their last edit."""
    lint_fixed: Finite
    """Problems of the linter that were gone the next time it ran over the same files."""
    asked: Finite
    """Share of attempts whose last message to the user holds a question."""


@message("step_done")
class StepDone(StepFigures, frozen=True, kw_only=True):
    """The outcome of a step that was taken."""

    run: str
    step: Count
    incarnation: Count = 0
    manifest_seq: Count
    groups: tuple[str, ...]
    staleness_bound: Count
    waited_s: Finite
    behaviour: Behaviour | None = None
    """None where no attempt called a tool."""
    efficiency: Efficiency | None = None
    """None in records of earlier versions of headrace."""


@message("step_failed")
class StepFailed(Message, frozen=True, kw_only=True):
    """A step that could not be taken. Its groups are dropped (step_failed). `version` has the bytes of the previous
    version, or after a rollback the bytes of an earlier version."""

    run: str
    step: Count
    incarnation: Count = 0
    version: Count
    state_hash: str
    manifest_seq: Count
    groups: tuple[str, ...]
    dropped_slots: Count
    reason: str
    detail: str = ""
    command: str = ""
    """The command that reproduces the failure."""
    restored: Version = -1
    """The version whose bytes and optimizer state were restored; -1 when none was."""
    efficiency: Efficiency | None = None
    """Where the step's time went. Nothing was trained, so trained tokens and model operations are 0; operations of a
    step that ended before its gradient are not counted. None in records of earlier versions of headrace."""


@message("snapshot_ready")
class SnapshotReady(Message, frozen=True, kw_only=True):
    """The trainer has written the weights of a version to an immutable file on its node."""

    run: str
    version: Count
    path: str
    state_hash: str
    bytes: Count
    learning_rate: Finite = 0.0
    written_s: Finite = 0.0
    """Seconds from the end of the step until the file was durable, most of them behind the next step; 0 for a file that
    existed."""
