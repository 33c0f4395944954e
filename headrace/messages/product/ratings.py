"""Ratings of users, the branch that trains on them, and the gate."""

from typing import Literal

import msgspec

from headrace.messages.base import Amount, Count, Finite, Message, Name, Share, Token, Version, message
from headrace.messages.rollout import PolicyRef
from headrace.messages.tasks import TaskRef

Fate = Literal["late", "capped", "opted_out", "unattributed", "superseded", "discarded", "closed"]
"""The end of a rating. ``closed``: it has a place in the branch's batches, and is trained when that batch is."""

Signal = Literal["thumb", "diff", "undo", "reward", "followup", "persistence", "cancel"]
Moment = Literal["", "10m", "24h", "merge"]
"""``diff``: the user accepted (up) or rejected (down) the changes that were shown. ``undo``: the user took them back.
``reward``: a program or a judge gave a number. ``followup``: the user's next prompt says that the work was wrong;
`comment` quotes the words. ``persistence``: the share of the lines that the agent added and that are still there at a
`Moment`; up from a half on."""

Stage = Literal["idle", "benchmark", "shadow", "canary", "promoted", "held", "rolled_back"]


def branch_key(branch: str) -> str:
    """Key of a branch's Branch record in HR_PRODUCT; the feedback actor writes it."""
    return f"feedback.{branch}.branch"


def gate_key(run: str) -> str:
    """Key of a run's GateState in HR_PRODUCT; the feedback actor writes it."""
    return f"feedback.{run}.gate"


@message("feedback")
class Feedback(Message, frozen=True, kw_only=True):
    """A user's rating of one production trajectory."""

    tenant: str
    user: Token
    """Keyed hash of the user id; the id itself never reaches the bus."""
    run: str
    trajectory: str
    thumb: Literal["up", "down"]
    signal: Signal = "thumb"
    final: bool = True
    """False: a provisional outcome, which a final one of the session replaces until it has a place in a batch."""
    at: Moment = ""
    """Of a persistence: when the lines were counted. After 10 minutes it is provisional."""
    reward: Share | None = None
    """Of the signal ``reward``: the number; `thumb` is up from 0.5 on."""
    training_allowed: bool = False
    comment: str = ""
    untrainable: str = ""
    """Why the session cannot be trained on although it is rated; empty when it can."""


@message("client_group")
class ClientGroup(Message, frozen=True, kw_only=True):
    """Rated sessions of one task that a client's loop ran, complete: the curriculum may issue them as a group. In the
    group each is an attempt, with the turns of all branches of its tree."""

    run: str
    group: Name
    """``<user hash>.<id>``"""
    task: TaskRef
    sessions: tuple[Name, ...]
    """The trees of the slots, in order: the groups of their first sessions."""


@message("feedback_settled")
class FeedbackSettled(Message, frozen=True, kw_only=True):
    """The end of one rating, except that of a rating in the branch's batches: its end is the outcome of the step."""

    run: str
    feedback_seq: Count
    """Sequence of the Feedback in HR_FEEDBACK."""
    fate: Fate
    detail: str = ""
    branch: str = ""
    group: str = ""
    """The group under which the branch trains on it; only with ``closed``."""


@message("ask_fate")
class AskFate(Message, frozen=True, kw_only=True):
    """What has become of the newest rating of a session? Answered with a FeedbackSettled, or with an Ack while the
    rating waits for a batch."""

    trajectory: str
    since: Count = 0
    """Sequence of a rating: the answer waits until this one is examined."""


class PurgedFeedback(msgspec.Struct, frozen=True):
    """A rating that is deleted with its user."""

    seq: Count
    group: str = ""
    """The group in the branch's batches, if it had a place there."""


@message("feedback_purged")
class FeedbackPurged(Message, frozen=True, kw_only=True):
    """The ratings of a user before the user's data is deleted, so that the ledger balances without the records. Later
    batches leave the user's earlier ratings out."""

    run: str
    user: str
    ratings: tuple[PurgedFeedback, ...]
    branch: str = ""
    last_version_before: Version = -1
    """The newest branch version that no rating of the user had a part in; -1 when none had a part in any version."""


@message("branch")
class Branch(Message, frozen=True, kw_only=True):
    """A branch run: it trains on rated sessions, and its version 0 is a version of another run."""

    run: str
    base_run: str
    base_version: Count
    base_hash: str


@message("shadow_turn")
class ShadowTurn(Message, frozen=True, kw_only=True):
    """A turn that a candidate answered beside the promoted version; no user sees it."""

    run: str
    policy: PolicyRef
    ok: bool
    """A turn was sampled."""
    detail: str = ""
    sampled: Count = 0


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Rated sessions of one policy in one stage."""

    sessions: Count = 0
    up: Count = 0


class PairedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate and promoted version on the same tasks."""

    tasks: Count = 0
    """Tasks that both were measured on."""
    won: Count = 0
    """Tasks that only the candidate passed."""
    lost: Count = 0
    """Tasks that only the promoted version passed."""
    lower: Finite = 0.0
    """Lower confidence bound of the difference of the pass rates."""


@message("gate_state")
class GateState(Message, frozen=True, kw_only=True):
    """The stage of the candidate and its figures; a value in HR_PRODUCT, so a restarted feedback actor continues and
    gateways route by it."""

    run: str
    stage: Stage = "idle"
    candidate: PolicyRef = PolicyRef()
    promoted: PolicyRef = PolicyRef()
    """The version that it is compared with."""
    share: Share = 0.0
    """Share of new sessions that the candidate serves."""
    step: Count = 0
    """Number of the canary stage."""
    since: Amount = 0.0
    """Seconds since the epoch at which the stage began."""
    seen_seq: Count = 0
    """Newest rating in HR_FEEDBACK that the arms hold."""
    control: Arm = Arm()
    treated: Arm = Arm()
    evidence: Finite = 0.0
    """Natural logarithm of the e-value of harm from the canary stages before this one."""
    shadowed: Count = 0
    shadow_failed: Count = 0
    benchmark: PairedFigures = PairedFigures()
    evaluations: tuple[str, str] = ("", "")
    """Ids of the candidate's evaluation and of the promoted version's."""


@message("gate_verdict")
class GateVerdict(Message, frozen=True, kw_only=True):
    """A change of stage, with the numbers that led to it."""

    run: str
    candidate: PolicyRef
    promoted: PolicyRef
    stage: Stage
    """The stage that begins."""
    share: Share = 0.0
    reason: str = ""
    benchmark: PairedFigures = PairedFigures()
    control: Arm = Arm()
    treated: Arm = Arm()
    harm_p: Finite = 1.0
    """The harm test's p-value at the end of the stage, from all canary stages so far."""
    shadowed: Count = 0
    shadow_failed: Count = 0
