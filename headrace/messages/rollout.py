"""A trajectory and what leads to it: request, turns, outcome."""

from typing import Literal

import msgspec

from headrace.messages.base import Array, Message, message
from headrace.messages.sandbox import Isolation
from headrace.messages.tasks import TaskRef

Lane = Literal["train", "eval", "production"]


class PolicyRef(msgspec.Struct, frozen=True):
    """Which policy acts: ``latest``, ``pinned`` (then `version`) or ``scripted`` (then `name`)."""

    kind: Literal["latest", "pinned", "scripted"] = "latest"
    version: int = -1
    name: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy; the log-probabilities are those under this sampling."""

    temperature: float = 1.0
    max_turn_tokens: int = 64
    seed: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A task's limits. Reaching one is an outcome and is scored; it is not a failure of infrastructure."""

    max_turns: int = 8
    max_tokens: int = 1024
    """Sampled tokens over the whole trajectory."""
    context_tokens: int = 768
    """Context length at which the policy is asked for a summary and a new segment starts."""
    wall_s: float = 120.0
    max_parallel_calls: int = 6


@message("rollout_request")
class RolloutRequest(Message, frozen=True, kw_only=True):
    """One slot to fill. The same struct on every lane: that is why the model cannot tell them apart."""

    run: str
    lane: Lane
    group: str
    slot: int
    attempt: int
    task: TaskRef
    seed: int
    policy: PolicyRef = PolicyRef()
    min_version: int = 0
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    isolation: Isolation = "group"
    prompt: str = ""
    """A user's words instead of the task's prompt (production lane)."""
    files: dict[str, bytes] = {}
    """A user's repository instead of the task's (production lane)."""
    handovers: int = 0

    @property
    def trajectory(self) -> str:
        """The id of the trajectory that this attempt writes; legal as the last token of a subject."""
        return f"{self.group}-{self.slot}-{self.attempt}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call as the policy wrote it. `error` is set when it was malformed: no tool runs, and the policy reads why."""

    id: str
    name: str
    arguments: dict[str, str] = {}
    error: str = ""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy reads back, in call order."""

    call_id: str
    ok: bool
    output: str
    truncated: bool = False
    wall_ms: float = 0.0


class Span(msgspec.Struct, frozen=True):
    """Positions start..end-1 of a segment were forwarded by `version`. The token at position i was therefore written
    by the version that forwarded position i - 1."""

    start: int
    end: int
    version: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation and its calls.

    A segment's context is the concatenation of (prompt_ids, ids) over its turns, token for token: nothing is ever
    tokenised twice.
    """

    index: int
    segment: int
    prompt_ids: Array
    """<i4 [n]: ids appended before sampling: the prompt, or the results of the previous turn."""
    ids: Array
    """<i4 [m]: sampled ids."""
    logprobs: Array
    """<f4 [m]: log-probability of each sampled id under the sampling that was used."""
    routed: Array | None = None
    """|u1 or <u2 [positions forwarded in this turn, layers, top_k]: experts that each position was routed to."""
    spans: tuple[Span, ...] = ()
    """Cover exactly the positions forwarded in this turn; the last sampled token has no forward yet."""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    stop: Literal["stop", "length", "abort"] = "stop"
    kind: Literal["act", "summary"] = "act"


@message("turn_sampled")
class TurnSampled(Message, frozen=True, kw_only=True):
    """Written before any call of the turn is sent: whoever resumes never samples this turn again."""

    run: str
    trajectory: str
    turn: Turn
    node: str = ""
    """Environment node that holds the sandbox, so that a successor finds it again."""
    sandbox: str = ""
    """Its id there: a sandbox of another id does not hold the work so far."""
    fingerprint: str = ""


@message("turn_done")
class TurnDone(Message, frozen=True, kw_only=True):
    """The results of a turn, after all its calls were answered."""

    run: str
    trajectory: str
    index: int
    results: tuple[ToolResult, ...]


@message("sandbox_kept")
class SandboxKept(Message, frozen=True, kw_only=True):
    """The attempt's sandbox as it was after a turn's calls, written behind its TurnDone: should it be lost, whoever
    goes on does so in a copy."""

    run: str
    trajectory: str
    index: int
    node: str
    data: bytes


@message("trajectory")
class Trajectory(Message, frozen=True, kw_only=True):
    """A finished attempt, published before its sandbox is released."""

    run: str
    lane: Lane
    group: str
    slot: int
    attempt: int
    id: str
    task: TaskRef
    family: str
    seed: int
    policy: PolicyRef
    sampling: Sampling
    outcome: Literal["finished", "max_turns", "max_tokens", "wall_time", "context", "sandbox_limit"]
    turns: tuple[Turn, ...]
    diff: dict[str, bytes]
    """Changed or new files among the allowed paths: path to content."""
    deleted: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    """Changed paths outside the allowed ones: ignored by the judge's run, read by its cheating rules."""
    digest_before: str = ""
    digest_after: str = ""
    fingerprint: str = ""
    """Numerics fingerprint of the engine; empty for scripted policies."""
    backend: str = ""
    isolation: Isolation = "group"
    wall_s: float = 0.0
    malformed_calls: int = 0
    rollout: str = ""
    """Which rollout actor finished it."""

    @property
    def oldest_version(self) -> int:
        """The oldest version that wrote a sampled token; -1 when none did."""
        return min((span.version for turn in self.turns for span in turn.spans if len(turn.ids)), default=-1)


@message("slot_failed")
class SlotFailed(Message, frozen=True, kw_only=True):
    """Our own parts failed an attempt. It never enters a baseline; the curriculum issues the slot again."""

    run: str
    lane: Lane
    group: str
    slot: int
    attempt: int
    reason: str
    """snake_case: ``sandbox_lost``, ``engine_error``, ``no_policy``, ``judge_lost``, ``deliveries_exhausted`` ..."""
    detail: str = ""
    rollout: str = ""
