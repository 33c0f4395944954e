"""Users, traffic, capacity that moves between lanes, and the turns of agents that run their own tools."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.messages.base import Amount, Array, Count, Finite, Message, Name, Seed, Share, Version, message
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling

CLIENT_SUITE = "client"
"""The suite in the Trajectory of a client's session; the task is the tenant."""
TurnStop = Literal["stop", "calls", "length"]
"""How a turn ended: by itself, with calls that the client runs, or at its token limit."""


@message("attempt_control")
class AttemptControl(Message, frozen=True, kw_only=True):
    """Asks the rollout actors of a run to end an attempt, or to release a held sandbox. Core NATS, at most once: its
    sender repeats it until it sees the effect."""

    run: str
    group: Name | None = None
    """Cancel the running attempt of this group."""
    workspace: Name | None = None
    """Release the sandbox held under this name."""
    user: Name | None = None
    """Cancel every running attempt of this user, release the sandboxes held for the user and forget the user's
    sessions."""
    turn: Name | None = None
    """Cut the client's turn with this id: what was sampled is recorded."""


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
    """The calls of an assistant's message."""
    call_id: str = ""
    """Of a tool's message: the call that it answers."""


def results_in_order(messages: Sequence[ClientMessage]) -> tuple[ClientMessage, ...]:
    """A history in which the results of a turn's calls stand in the order of the calls.

    Clients send the results of parallel calls in the order in which their tools ended. Many chat formats show no id of
    a call, so a policy can tell results apart by their order alone, and equal histories must give equal token ids."""
    ordered: list[ClientMessage] = []
    places: dict[str, int] = {}
    for results, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        if results and len(places) > 1:
            ordered += sorted(run, key=lambda result: places.get(result.call_id, len(places)))
        else:
            ordered += run
        places = {call.id: place for place, call in enumerate(ordered[-1].calls)}
    return tuple(ordered)


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
    """Tokens of the prompt that the session had rendered before."""
    sampled: Count = 0


@message("traffic")
class Traffic(Message, frozen=True, kw_only=True):
    """Load of the product at one gateway or rollout actor, published every second and by gateways on a rise, on core
    NATS."""

    region: str
    active: Count
    """Running sessions, plus the highest number of concurrent client turns since the last report."""
    waiting: Count
    requests_per_s: Amount
    capacity: Count
    run: str = ""
    """The run that serves the product; a scavenger reads the traffic of its own run."""
    server: str = ""
    """Empty: load of a gateway. Otherwise: a rollout actor of the product in this region, and the load that other
    clients put on its SGLang server."""
    gateway: str = ""
    """The gateway's id: a region may have several."""


@message("capacity_lease")
class CapacityLease(Message, frozen=True, kw_only=True):
    """The lanes that a rollout actor pulls from; a value in HR_LEASE whose revision is the fencing token."""

    rollout: str
    lanes: tuple[str, ...]
    reason: str
    since: Amount


def lease_key(run: str, rollout: str) -> str:
    """Key of a rollout actor's lease in HR_LEASE: ids are the configuration's, and several runs may share a broker."""
    return f"{run}.{rollout}"


@message("promotion")
class Promotion(Message, frozen=True, kw_only=True):
    """The version that serves production from now on: one that passed the gate, or an earlier one after a rollback."""

    run: str
    version: Version
    eval_id: str = ""
    rate: Share = 0.0
    previous_rate: Share = 0.0
    reason: str = ""
    branch: str = ""
    """The run whose version it is; empty: `run` itself."""

    @property
    def policy(self) -> PolicyRef:
        """The promoted version as a request names it."""
        return PolicyRef("pinned", self.version, run=self.branch)


def promotion_key(run: str) -> str:
    """Key of a run's newest Promotion in HR_PRODUCT; the feedback actor writes it."""
    return f"feedback.{run}"


@message("open_session")
class OpenSession(Message, frozen=True, kw_only=True):
    """A session that has not ended, kept in HR_SESSION so that the next gateway continues it."""

    request: RolloutRequest
    started: Amount
    """Seconds since the epoch."""
    complete: bool = True
    """False: the request's files are too large to keep, so it cannot be tried again."""


TURN_S = 300.0
"""The longest wait of a gateway for a turn that a client's agent requests."""


class TurnPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded turn."""

    group: str
    index: Count


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token of a turn's text."""

    text: str
    logprob: Finite


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a turn, as its record has them."""

    prompt_ids: Array
    """<i4 [p]: everything before the first sampled id."""
    ids: Array
    """<i4 [m]"""
    logprobs: Array
    """<f4 [m]"""
    versions: Array
    """<i4 [m]: the version that sampled each id."""
    routed: Array | None = None
    """|u1 or <u2 [p + m - 1, layers, top_k]: the experts of every forwarded position; None where the engine records no
    routes."""


@message("client_turn", version=2)
class ClientTurn(Message, frozen=True, kw_only=True):
    """A request to a rollout actor of the production lane for a turn of an agent that runs its own tools. The turn log
    holds the whole state, so any rollout actor of the lane may answer the next request."""

    run: str
    group: str
    """``<user hash>.<session>``."""
    messages: tuple[ClientMessage, ...]
    """The whole history, as the client sends it."""
    known: Count = 0
    """How many of them the session's ids hold already; the last of those is the turn that was sampled."""
    tools: tuple[ClientTool, ...] = ()
    parallel: bool = True
    """False: the turn has one call at most; the words of further ones stay in its ids."""
    policy: PolicyRef = PolicyRef()
    sampling: Sampling = Sampling()
    seed: Seed = 0
    context_tokens: Count = 0
    """Longest context of prompt and turn together."""
    recorded: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """The index of a recorded turn that is answered again, because the client repeats its request: nothing is sampled.
    -1: a new turn."""
    count_only: bool = False
    """Render the prompt and say how long it is; nothing is sampled or recorded."""
    id: str = ""
    """Under which it can be cut; empty: it cannot."""
    stream: bool = False
    """Send ClientTurnParts while it is sampled."""
    forced: tuple[str, ...] = ()
    """The turn calls one of these tools: the beginning of such a call stands at the end of its prompt."""
    stops: tuple[str, ...] = ()
    """Its text ends before the first of these."""
    answer: str = ""
    """A JSON Schema, as JSON, that its text keeps by the engine's grammar; empty: any text."""
    logprobs: bool = False
    """Say the log-probabilities of the text."""
    tokens: bool = False
    """Say the turn's tokens."""
    behind: TurnPlace | None = None
    """It goes on behind this recorded turn, whose ids and those before it are its context; `messages` are the new
    ones. None: `messages` are the whole history."""


@message("client_turn_part")
class ClientTurnPart(Message, frozen=True, kw_only=True):
    """The tokens of a turn since the part before, read. At most once: ClientTurnDone has the whole turn. Its texts
    begin with the parts' text."""

    number: Count
    """Counts the parts of a turn from 0."""
    usage: ClientUsage
    thinking: str = ""
    text: str = ""
    """Before the first call."""
    calls: tuple[ClientCall, ...] = ()
    """Calls that begin or go on; the arguments are the next piece."""


@message("client_turn_done", version=2)
class ClientTurnDone(Message, frozen=True, kw_only=True):
    """The answer to a ClientTurn."""

    thinking: str = ""
    text: str = ""
    calls: tuple[ClientCall, ...] = ()
    after: str = ""
    """Text behind the first call."""
    stop: TurnStop = "stop"
    usage: ClientUsage = ClientUsage(prompt=0)
    version: Version = -1
    """The newest version that wrote a token of it."""
    refused: str = ""
    """Why there is no turn, for the client: its request cannot be used. Empty when there is one."""
    full: bool = False
    """It cannot be used because the conversation is longer than the policy's context."""
    failed: str = ""
    """Why there is no turn: a part of headrace failed. Asking again may help."""
    stopped_by: str = ""
    """The one of `ClientTurn.stops` that ended it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: TurnTokens | None = None
    behind: bool = False
    """Nothing was sampled, because the session has a turn that the gateway does not know. The gateway begins a
    branch."""

    @property
    def said(self) -> str:
        """All of its text."""
        return "\n".join(filter(None, (self.text, self.after)))


@message("client_session_end")
class ClientSessionEnd(Message, frozen=True, kw_only=True):
    """A client's session is over: its turns become a Trajectory. Answered with an Ack."""

    run: str
    group: str
    tenant: str
    training_allowed: bool
    policy: PolicyRef = PolicyRef()
    sampling: Sampling = Sampling()
    seed: Seed = 0
    untrainable: str = ""
    """Why its turns cannot be trained on together; empty when they can."""
    labels: dict[str, str] = {}
    """The task, group and metadata with which the client opened the session."""


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of a ClientSession, by digests: it holds no text. Its place in the session is its index in the record."""

    history: str
    """Of the tools and all messages up to its reply."""
    asked: str
    """Of the whole request."""
    tools: str = ""
    """Of the tools alone."""
    retry: str = ""
    """Of the client's Idempotency-Key; empty without one."""
    lost: bool = False
    """Its answer did not reach the client."""


@message("client_session", version=2)
class ClientSession(Message, frozen=True, kw_only=True):
    """A session as the gateways keep it in HR_SESSION: any of them goes on with it. A session that ended stays for
    a while, so that no other conversation is taken for it."""

    group: str
    """``<user hash>.<id>``, of a branch ``<user hash>.<id of the tree>-<number>``; clients name and rate it."""
    tenant: str
    key: str = ""
    """The id of the API key that began it."""
    named: str = ""
    """The tree's name in the client's own header; empty where it sent none."""
    turns: tuple[RecordedTurn, ...] = ()
    training_allowed: bool
    policy: PolicyRef = PolicyRef()
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    """Temperature of its first turn."""
    untrainable: str = ""
    """Why it cannot be trained on; empty when it can."""
    labels: dict[str, str] = {}
    """The task, group and metadata with which the client opened it."""
    last_used: Amount = 0.0
    """Seconds since the epoch."""
    ended: Amount = 0.0
    """Seconds since the epoch; 0.0 while it is open."""
    rated: bool = False
    """It was rated under its own id, so a rating of its tree leaves it out."""
