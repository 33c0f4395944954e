"""The product lane: users, traffic, capacity that moves between lanes; ratings, the branch that trains on them, and the
gate."""

from typing import Literal

import msgspec

from headrace.messages.base import Count, Message, Version, message
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling

TurnStop = Literal["stop", "calls", "length"]
"""How a turn ended: by itself, with calls that the client runs, or at its token limit."""


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool that the client runs."""

    id: str
    name: str
    arguments: str
    """A JSON object as text."""


class ClientMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a client's history."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[ClientCall, ...] = ()
    """Of an assistant's message."""
    call_id: str = ""
    """Of a tool's message: the call that it answers."""


class ClientTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: str
    description: str = ""
    parameters: dict[str, object] = {}
    """JSON Schema of its arguments."""


class ClientUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one turn."""

    prompt: Count
    cached: Count = 0
    """Of the prompt: tokens that the session had rendered before."""
    sampled: Count = 0


@message("feedback")
class Feedback(Message, frozen=True, kw_only=True):
    """A user's thumb up or down on one production trajectory."""

    tenant: str
    user: str
    """Keyed hash of the user id; the id itself never reaches the bus."""
    run: str
    trajectory: str
    thumb: Literal["up", "down"]
    training_allowed: bool = False
    comment: str = ""
    untrainable: str = ""
    """Why the session cannot be trained on although it is rated; empty when it can."""


@message("traffic")
class Traffic(Message, frozen=True, kw_only=True):
    """Load of the product in one region, published every second on core NATS."""

    region: str
    active: Count
    waiting: Count
    requests_per_s: float
    capacity: Count
    run: str = ""
    """The run that serves the product; a scavenger reads the traffic of its own run."""
    server: str = ""
    """Empty: load of a gateway. Otherwise: the load that other clients put on this rollout actor's server."""


@message("capacity_lease")
class CapacityLease(Message, frozen=True, kw_only=True):
    """The lanes that a rollout actor pulls from; a value in HR_LEASE whose revision is the fencing token."""

    rollout: str
    lanes: tuple[str, ...]
    reason: str
    since: float


def lease_key(run: str, rollout: str) -> str:
    """Key of a rollout actor's lease in HR_LEASE: ids are the configuration's, and several runs may share a broker."""
    return f"{run}.{rollout}"


@message("promotion")
class Promotion(Message, frozen=True, kw_only=True):
    """The version that serves production from now on: one that passed the gate, or an earlier one after a rollback."""

    run: str
    version: Version
    eval_id: str = ""
    rate: float = 0.0
    previous_rate: float = 0.0
    reason: str = ""
    branch: str = ""
    """The run whose version it is; empty: `run` itself."""

    @property
    def policy(self) -> PolicyRef:
        """The promoted version as a request names it."""
        return PolicyRef("pinned", self.version, run=self.branch)


def promotion_key(run: str) -> str:
    """Key of a run's newest Promotion in HR_STATE; the feedback actor writes it."""
    return f"feedback.{run}"


@message("open_session")
class OpenSession(Message, frozen=True, kw_only=True):
    """A session that has not ended, kept in HR_SESSION so that the next gateway continues it."""

    request: RolloutRequest
    started: float
    """Seconds since the epoch."""
    complete: bool = True
    """False: the request's files are too large to keep, so it cannot be tried again."""


@message("purge_user")
class PurgeUser(Message, frozen=True, kw_only=True):
    """Purge a user's data: feedback, trajectories, turns, scores and blobs under the user's hash. Answered with an
    Ack."""

    user: str


@message("client_turn")
class ClientTurn(Message, frozen=True, kw_only=True):
    """A turn for an agent that runs its own tools: asked of a rollout actor of the production lane, by request and
    reply. The rollout actor keeps nothing that its turn log does not hold, so any of them may answer the next one."""

    run: str
    group: str
    """``<user hash>.<session>``."""
    segment: Count
    """Grows when the client rewrote its history: the context starts again."""
    messages: tuple[ClientMessage, ...]
    """The whole history, as the client sends it."""
    known: Count = 0
    """How many of them the segment's ids hold already; the last of those is the turn that was sampled."""
    tools: tuple[ClientTool, ...] = ()
    policy: PolicyRef = PolicyRef()
    sampling: Sampling = Sampling()
    seed: int = 0
    context_tokens: Count = 0
    """Longest context of prompt and turn together."""
    count_only: bool = False
    """Render the prompt and say how long it is; nothing is sampled or recorded."""


@message("client_turn_done")
class ClientTurnDone(Message, frozen=True, kw_only=True):
    """The answer to a ClientTurn."""

    text: str = ""
    calls: tuple[ClientCall, ...] = ()
    stop: TurnStop = "stop"
    usage: ClientUsage = ClientUsage(prompt=0)
    version: Version = -1
    """The newest version that wrote a token of it."""
    refused: str = ""
    """Why there is no turn, for the client: its request cannot be used. Empty when there is one."""
    failed: str = ""
    """Why there is no turn: a part of headrace failed. Asking again may help."""


@message("client_session_end")
class ClientSessionEnd(Message, frozen=True, kw_only=True):
    """A client's session is over: its turns become a Trajectory. Answered with an Ack."""

    run: str
    group: str
    tenant: str
    training_allowed: bool
    policy: PolicyRef = PolicyRef()
    sampling: Sampling = Sampling()
    seed: int = 0


@message("client_session")
class ClientSession(Message, frozen=True, kw_only=True):
    """An open session as the gateway keeps it in HR_SESSION: after a restart the gateway finds it again by its
    history."""

    group: str
    tenant: str
    named: str
    """The session as the client names it; empty where it names none."""
    head: str
    """Digest of tools: other tools are another prompt."""
    history: tuple[str, ...]
    """Digests of the messages that the segment's ids hold."""
    segment: Count
    training_allowed: bool
    policy: PolicyRef = PolicyRef()
    temperature: float = 1.0
    """Of its first turn."""
    untrainable: str = ""
    """Why it cannot be trained on; empty when it can."""
    rewrites: Count = 0
    """How often the client rewrote its history."""
    last_used: float = 0.0
    """Seconds since the epoch."""


Fate = Literal["late", "capped", "opted_out", "unattributed", "superseded", "discarded", "closed"]
"""The end of a rating. ``closed``: it has a place in the branch's batches, and is trained when that batch is."""

Stage = Literal["idle", "benchmark", "shadow", "canary", "promoted", "held", "rolled_back"]


def branch_key(branch: str) -> str:
    """Key of a branch's Branch record in HR_STATE; the feedback actor writes it."""
    return f"feedback.{branch}.branch"


def gate_key(run: str) -> str:
    """Key of a run's GateState in HR_STATE; the feedback actor writes it."""
    return f"feedback.{run}.gate"


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
    lower: float = 0.0
    """Lower confidence bound of the difference of the pass rates."""


@message("gate_state")
class GateState(Message, frozen=True, kw_only=True):
    """Where the candidate stands; a value in HR_STATE, so a restarted feedback actor goes on and gateways route by
    it."""

    run: str
    stage: Stage = "idle"
    candidate: PolicyRef = PolicyRef()
    promoted: PolicyRef = PolicyRef()
    """The version that it is compared with."""
    share: float = 0.0
    """Share of new sessions that the candidate serves."""
    step: Count = 0
    """Number of the canary stage."""
    since: float = 0.0
    """Seconds since the epoch at which the stage began."""
    seen_seq: Count = 0
    """Newest rating in HR_FEEDBACK that the arms hold."""
    control: Arm = Arm()
    treated: Arm = Arm()
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
    share: float = 0.0
    reason: str = ""
    benchmark: PairedFigures = PairedFigures()
    control: Arm = Arm()
    treated: Arm = Arm()
    harm_p: float = 1.0
    """Always-valid p-value of the harm test in the stage that ends."""
    shadowed: Count = 0
    shadow_failed: Count = 0


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an agent, and its end."""

    id: str
    prompt: str
    state: Literal["RUNNING", "FINISHED", "ERROR", "CANCELLED"] = "RUNNING"
    created: float
    ended: float = 0.0
    detail: str = ""
    changed: tuple[str, ...] = ()
    """Paths that it wrote or deleted."""
    node: str = ""
    sandbox: str = ""
    restored: bool = False
    """The sandbox of the run before was gone: this one began with its files alone."""


@message("agent")
class Agent(Message, frozen=True, kw_only=True):
    """An agent of the product: a workspace and the runs in it; a value in HR_SESSION."""

    id: str
    user: str
    tenant: str
    training_allowed: bool
    policy: PolicyRef
    image: str = ""
    files: dict[str, bytes] = {}
    """The workspace after its last finished run; empty where it is too large to keep."""
    runs: tuple[AgentRun, ...]
    archived: bool = False
    webhook: str = ""
    webhook_secret: str = ""
