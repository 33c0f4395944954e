"""A trajectory and what leads to it: renderer bundle, request, turns, outcome."""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.messages.base import Array, Count, Finite, Integer, Message, Name, Seconds, Seed, Version, message
from headrace.messages.operations import BlobRef
from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import Change, Isolation, Snapshot
from headrace.messages.search import Retrieved
from headrace.messages.tasks import TaskRef

Lane = Literal["train", "eval", "production"]


class PolicyRef(msgspec.Struct, frozen=True):
    """The policy that acts: ``latest`` follows every swap, ``pinned`` names a `version`, ``scripted`` a script by
    `name`."""

    kind: Literal["latest", "pinned", "scripted"] = "latest"
    version: Version = -1
    name: str = ""
    run: Annotated[str, Meta(pattern=r"^[a-z0-9_-]*\Z", max_length=200)] = ""
    """The run whose version a pinned one is; empty: the run of the request."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Temperature 0 is greedy. Recorded log-probabilities are those under this sampling."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    max_turn_tokens: Count = 64
    seed: Seed = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A task's limits. An attempt that reaches one ends with an outcome and is scored; it is no infrastructure
    failure."""

    max_turns: Count = 8
    max_tokens: Count = 1024
    """Sampled tokens over the whole trajectory."""
    context_tokens: Count = 768
    """Context length at which the policy is asked for a summary and a new segment starts."""
    wall_s: Seconds = 120.0
    max_parallel_calls: Count = 6
    reserve_tokens: Count = 0
    """Tokens of context that are reserved for a summary with its thinking: the summary is requested this many tokens
    before the limit."""
    max_summaries: Count = 64
    """Summaries of one attempt; one more ends it with the outcome ``context``."""


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that outlives its attempt: attempts of one name use it one after another."""

    name: Name
    """``<user hash>.<agent>``: it takes the place of the group in the sandbox's key."""
    turn: Count = 0
    """Earlier requests in it."""
    node: str = ""
    """Where it was last; empty at the beginning."""
    hold_s: Seconds = 0.0
    """How long it is held after the attempt."""


@message("rollout_request")
class RolloutRequest(Message, frozen=True, kw_only=True):
    """A request for one attempt of one slot. All lanes use the same struct, so a policy cannot tell them apart."""

    run: str
    lane: Lane
    group: Name
    slot: Count
    attempt: Count
    task: TaskRef
    seed: Seed
    policy: PolicyRef = PolicyRef()
    min_version: Count = 0
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    isolation: Isolation = "group"
    prompt: str = ""
    """The user's prompt, in place of the task's (production lane)."""
    files: dict[str, bytes] = {}
    """The user's repository, path to content, in place of the task's (production lane)."""
    handovers: Count = 0
    """Number of times that a rollout actor published the request again, because it was drained or found no sandbox."""
    waited_s: Seconds = 0.0
    """How long its rollout actors have waited for a sandbox."""
    workspace: Workspace | None = None
    """The sandbox to work in and to hold afterwards; None: one of its own, released at the end."""
    harness: str | UnsetType = UNSET
    """The program that acts in the sandbox, by its name in the configuration. Unset: headrace's own agent."""

    @property
    def trajectory(self) -> str:
        """The id of the trajectory that this attempt writes; legal as the last token of a subject."""
        return f"{self.group}-{self.slot}-{self.attempt}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the policy wrote it. With `error` the call was malformed: no tool ran, and the policy reads the
    error."""

    id: str
    name: str
    arguments: dict[str, str] = {}
    error: str = ""
    wire_id: str = ""
    """The id that the model wrote, in chat formats whose results name it; empty where the renderer derives one."""
    alias: str = ""
    """The name that the model wrote, in records of attempts whose tools had other words; `name` is the tool's own."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call, as the policy reads it. Results are in the order of the calls."""

    call_id: str
    ok: bool
    output: str
    truncated: bool = False
    wall_ms: Finite = 0.0
    retrieved: Retrieved | None = None
    """The evidence of a semantic search."""


class Span(msgspec.Struct, frozen=True):
    """Positions start..end-1 of a segment were forwarded by `version`. The token at position i was therefore written
    by the version that forwarded position i - 1."""

    start: Count
    end: Count
    version: Version


class TokenKinds(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of a turn by kind. The others are text: the final message, a summary, the stop token."""

    thinking: Count
    """With the markers of the thinking, as far as they are sampled."""
    calls: Count
    """With the markers of the calls."""


class PackedRoutes(msgspec.Struct, frozen=True):
    """Routes as they are stored (policy/routes.py)."""

    dtype: Literal["|u1", "<u2"]
    shape: tuple[Count, Count, Count]
    """[positions, layers, top_k]"""
    data: bytes


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation and its calls.

    A segment's context is the concatenation of (prompt_ids, ids) over its turns, token for token: nothing is ever
    tokenised twice.
    """

    index: Count
    segment: Count
    prompt_ids: Array
    """<i4 [n]: ids appended before sampling: the prompt, or the results of the previous turn."""
    ids: Array
    """<i4 [m]: sampled ids."""
    logprobs: Array
    """<f4 [m]: log-probability of each sampled id under the sampling that was used."""
    routed: Array | None = None
    """|u1 or <u2 [positions, layers, top_k]: experts that each position was routed to, from `routed_start` to the last
    position forwarded in this turn."""
    spans: tuple[Span, ...] = ()
    """They cover exactly the positions forwarded in this turn, in the order of forwards; the last sampled token is
    forwarded in the next one. A position may be in several spans and turns, because it was forwarded again after a swap
    or by another engine. The token after it was sampled from its first forward in the turn that sampled the token."""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    stop: Literal["stop", "length", "abort"] = "stop"
    kind: Literal["act", "summary"] = "act"
    kinds: TokenKinds | UnsetType = UNSET
    """Unset where the renderer does not count them."""
    forced: Count = 0
    """The last ids of the prompt with which the turn itself begins: a client forced a call."""
    routed_start: Count | UnsetType = UNSET
    """First position of `routed`. Unset: that of the first span. Positions before it were forwarded again, and their
    routes are in earlier turns: the trainer replays the routes of a position's first forward."""
    packed: PackedRoutes | UnsetType = UNSET
    """`routed` of a stored record, in fewer bytes; unset where it has none, or has them as they are."""
    caller: str | UnsetType = UNSET
    """The id of the call of ``delegate`` whose child agent sampled it; unset for the attempt's own agent."""

    @property
    def says_finish(self) -> bool:
        """Whether its agent ends."""
        return any(call.name == "finish" and not call.error for call in self.calls)

    @property
    def finishes(self) -> bool:
        """Whether it ends the task, or the present step of one with steps."""
        return self.caller is UNSET and self.says_finish

    @property
    def first_routed(self) -> int:
        """First position of `routed`."""
        if isinstance(self.routed_start, int):
            return self.routed_start
        return self.spans[0].start if self.spans else 0


def routes_end(turns: Iterable[Turn], segment: int) -> int:
    """Number of positions, from the first of a segment on, whose routes its turns hold."""
    end = 0
    for turn in turns:
        if turn.segment == segment and turn.routed is not None and turn.first_routed <= end:
            end = max(end, turn.first_routed + len(turn.routed))
    return end


def versions(turns: Iterable[Turn]) -> list[int]:
    """The version of every sampled token, in order; -1 if no span of its turn covers the position before it.

    A token was sampled by the version that computed the position before it first in the same turn."""
    sampled_by: list[int] = []
    lengths: dict[int, int] = {}
    for turn in turns:
        start = lengths.get(turn.segment, 0) + len(turn.prompt_ids)
        lengths[turn.segment] = start + len(turn.ids)
        for position in range(start - 1, start + len(turn.ids) - 1):
            covering = [span.version for span in turn.spans if span.start <= position < span.end]
            sampled_by.append(covering[0] if covering else -1)
    return sampled_by


def kinds_of(turns: Iterable[Turn]) -> TokenKinds | None:
    """The sampled tokens of several turns by kind; None where a turn does not count them."""
    thinking = calls = 0
    for turn in turns:
        if not isinstance(turn.kinds, TokenKinds):
            return None
        thinking, calls = thinking + turn.kinds.thinking, calls + turn.kinds.calls
    return TokenKinds(thinking=thinking, calls=calls)


@message("turn_sampled")
class TurnSampled(Message, frozen=True, kw_only=True):
    """A sampled turn, stored before any of its calls is sent. An actor that resumes the attempt never samples it
    again."""

    run: str
    trajectory: Name
    turn: Turn
    node: str = ""
    """The environment node that holds the sandbox; an actor that resumes the attempt asks there."""
    sandbox: str = ""
    """The sandbox's id on that node. A sandbox with another id does not hold the work so far."""
    fingerprint: str = ""


@message("turn_done")
class TurnDone(Message, frozen=True, kw_only=True):
    """The results of a turn, stored after all of its calls were answered."""

    run: str
    trajectory: Name
    index: Count
    results: tuple[ToolResult, ...]
    step: Snapshot | UnsetType = UNSET
    """The changes so far, where the turn ends a step that is not the last."""


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which a session of a client's own agent was recorded."""

    training_allowed: bool
    """Its tenant allowed training when it began."""
    untrainable: str = ""
    """Why its turns cannot be trained on together; empty when they can."""
    labels: dict[str, str] = {}
    """The task, group and metadata with which the client opened the session."""


class HarnessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness's attempt went. Every conversation that it held is a segment of the attempt."""

    name: str
    code: Integer
    """Its exit code; a signal counts as its negative number."""
    requests: Count
    """Model calls that it made, the refused and the repeated ones among them."""
    rewritten: Count
    """Turns whose history is in no record: it was rewritten, so they begin a segment, where it is not trained on."""
    unrewarded: tuple[Count, ...] = ()
    """Segments without advantage, by `[harness] reward`."""
    said: str = ""
    """The end of its output, where it did not finish."""


@message("trajectory")
class Trajectory(Message, frozen=True, kw_only=True):
    """A finished attempt with all of its turns and its diff, stored before its sandbox is released."""

    run: str
    lane: Lane
    group: Name
    slot: Count
    attempt: Count
    id: Name
    task: TaskRef
    family: str
    seed: Seed
    policy: PolicyRef
    sampling: Sampling
    outcome: Literal[
        "finished", "max_turns", "max_tokens", "wall_time", "context", "sandbox_limit", "cancelled", "crashed"
    ]
    """``cancelled``: a user of the production lane ended it; the turns until then are here, the diff is empty.
    ``crashed``: the harness ended with another exit code than 0, by no fault of its endpoint."""
    turns: tuple[Turn, ...]
    diff: dict[str, bytes]
    """Changed or new files among the allowed paths: path to content."""
    deleted: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    """In a task with an image: every change of an allowed path, with modes and links; the contents lie in `diff`."""
    originals: dict[str, bytes] = {}
    """The former content of changed files of an image, as far as it is small."""
    touched: tuple[str, ...] = ()
    """Changed paths outside the allowed ones: the judge's tests ignore them, its notes name them."""
    earlier: tuple[Snapshot, ...] | UnsetType = UNSET
    """The changes so far at the end of every earlier step; the fields above are those of the step that was reached."""
    digest_before: str = ""
    digest_after: str = ""
    fingerprint: str = ""
    """Numerics fingerprint of the engine; empty for scripted policies."""
    renderer: str = ""
    """sha256 of the RendererBundle that wrote the prompts and read the calls; empty for one without a bundle."""
    backend: str = ""
    machine: str | UnsetType = UNSET
    """Content address of the template or image that its sandbox was made of; unset, and then not encoded, where the
    backend cannot tell."""
    isolation: Isolation = "group"
    wall_s: Finite = 0.0
    malformed_calls: Count = 0
    rollout: str = ""
    """Id of the rollout actor that finished the attempt."""
    altered: bool = False
    """The request had a prompt or files of its own instead of the task's."""
    capture: Capture | None = None
    """Of a client's session; None for attempts of headrace's own agent."""
    plugins: tuple[Plugin, ...] = ()
    """Tools, engine, renderer and sandbox backend from outside of headrace: name, version and source hash. The Score
    repeats them."""
    turns_from: Count = 0
    """Its first record in HR_TURN, whose records have the routes of its turns; 0: the turns have them themselves."""
    harness: HarnessEnd | UnsetType = UNSET
    """Unset, and then not encoded, for headrace's own agent."""

    @property
    def oldest_version(self) -> int:
        """The oldest version that wrote a sampled token; -1 when none did."""
        return min((span.version for turn in self.turns for span in turn.spans if len(turn.ids)), default=-1)


def changes_digest(trajectory: Trajectory) -> bytes:
    """sha256 of all that an attempt changed: contents, deletions, modes and links, paths outside the allowed ones, what
    changed files held before, and the changes at the end of every earlier step. Each part has its type and length."""
    fields = ("diff", "deleted", "changes", "touched", "originals", "earlier")
    parts = {name: getattr(trajectory, name) or () for name in fields}
    return hashlib.sha256(msgspec.msgpack.encode(parts, order="deterministic")).digest()


LEFT_OUT = ("judge_fault", "reward_error", "no_verdict")
"""Reasons of an attempt that has no verdict and would have none again: its slot is left out without another attempt."""


@message("slot_failed")
class SlotFailed(Message, frozen=True, kw_only=True):
    """An attempt that infrastructure failed. It enters no baseline; the curriculum issues the slot again."""

    run: str
    lane: Lane
    group: Name
    slot: Count
    attempt: Count
    reason: str
    """A rollout actor writes ``sandbox_lost``, ``engine_error``, ``search_lost``, ``no_policy``, ``tree_too_large``,
    ``no_environment``, ``no_capacity``, ``harness_failed``, ``cancelled``; a judge writes ``judge_lost``,
    ``judge_endpoint``, and one of `LEFT_OUT`."""
    detail: str = ""
    rollout: str = ""


@message("renderer_bundle")
class RendererBundle(Message, frozen=True, kw_only=True, dict=True):
    """Tokenizer, chat template, and the other inputs of rendering. The trainer makes it once for a run."""

    renderer: str
    """The name that ``[policy] renderer`` resolved to: ``terse``, a wire syntax, or a plugin."""
    tokenizer_json: str
    chat_template: str = ""
    """Jinja source; empty for the terse format."""
    template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables that the template gets, such as ``enable_thinking``."""
    special_tokens: dict[str, str] = {}
    """Variables that name tokens, such as ``bos_token``."""
    eos_ids: tuple[Count, ...] = ()
    """End-of-sequence ids of the checkpoint's generation_config.json."""
    generation: dict[str, bool | int | float | str | list[int]] = {}
    """The rest of generation_config.json, for an export of the policy."""
    system: str = ""
    """The system message."""
    date: str = ""
    """ISO date that the template sees as today, whenever it renders."""
    tools: dict[str, str] = {}
    """JSON Schema of every tool as text, by name."""
    plugin: str = ""
    """Source hash of a renderer from outside; empty for a built-in."""

    @cached_property
    def sha256(self) -> str:
        """The bundle's name: a hash of every field."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


@message("renderer_record")
class RendererRecord(Message, frozen=True, kw_only=True):
    """Which bundle a run uses: a value in HR_RENDERER under `renderer_key(run)`, written by the trainer."""

    run: str
    sha256: str
    blob: BlobRef
    """Where the bundle's bytes are."""


def renderer_key(run: str) -> str:
    """Key of a run's RendererRecord in HR_RENDERER."""
    return f"trainer.{run}.renderer"
