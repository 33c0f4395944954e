"""A step as a pure function of recorded streams: what went in, what came out."""

import msgspec

from headrace.messages.base import Message, message


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch by sequence: its closing, and (trajectory, score) per slot."""

    group: str
    close_seq: int
    slots: tuple[tuple[int, int], ...]


@message("step_manifest")
class StepManifest(Message, frozen=True, kw_only=True):
    """Everything a step depends on, published before it runs. Replaying it gives the same bits."""

    run: str
    step: int
    """Batch number k; the step takes version k to version k + 1."""
    incarnation: int = 0
    version: int
    base_hash: str
    groups: tuple[BatchGroup, ...]
    seed: int
    code: str
    """Version of the package and git revision when there is one."""
    fingerprint: str
    objective: dict[str, float | int | str | bool] = {}


class EngineMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sampler against trainer over the re-scored tokens of one engine, with the weights that wrote them."""

    engine: str
    """The rollout actor that it belongs to."""
    fingerprint: str
    same_fingerprint: bool
    """As the trainer's: then every figure below is 0 in exact mode."""
    tokens: int = 0
    k1: float = 0.0
    k3: float = 0.0
    max_abs_dlp: float = 0.0
    differ: float = 0.0
    """Share of tokens whose two log-probabilities are not equal."""
    flips: float = 0.0
    """Share of token-layers that the trainer would route to other experts."""


@message("step_done")
class StepDone(Message, frozen=True, kw_only=True):
    """A step's outcome; `version` is what it produced."""

    run: str
    step: int
    incarnation: int = 0
    version: int
    state_hash: str
    manifest_seq: int
    groups: tuple[str, ...]
    trained_slots: int
    loss: float
    grad_norm: float
    learning_rate: float
    reward_mean: float
    pass_rate: float
    tokens: int
    staleness: dict[str, int]
    """Staleness (k minus the version that wrote a token), as text, to number of sampled tokens."""
    staleness_max: int
    staleness_bound: int
    k1: float
    k3: float
    max_abs_dlp: float
    """Largest |sampler - trainer| log-probability over the re-scored sample; NaN when none was re-scored."""
    rescored_tokens: int
    exact: bool
    seconds: float
    waited_s: float
    entropy: float = 0.0
    clipped: float = 0.0
    engines: tuple[EngineMismatch, ...] = ()
    alarm: str = ""
    """Which engine is above which limit of [numerics], or has another fingerprint; empty when all is well."""


@message("step_failed")
class StepFailed(Message, frozen=True, kw_only=True):
    """A step that could not be taken. Its groups are dropped (step_failed); `version` has the old bytes, or after a
    rollback those of an earlier version."""

    run: str
    step: int
    incarnation: int = 0
    version: int
    state_hash: str
    manifest_seq: int
    groups: tuple[str, ...]
    dropped_slots: int
    reason: str
    detail: str = ""
    command: str = ""
    """The one command that reproduces it."""
    restored: int = -1
    """The earlier version whose bytes and optimizer were put back; -1 when none was."""


@message("snapshot_ready")
class SnapshotReady(Message, frozen=True, kw_only=True):
    """The trainer wrote the published weights of a version: an immutable file on its node."""

    run: str
    version: int
    path: str
    state_hash: str
    bytes: int
    learning_rate: float = 0.0
