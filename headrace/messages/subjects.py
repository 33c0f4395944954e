"""Every subject and every stream, once. docs/subjects.md shows it as a table.

``hr.<plane>.<kind>.<scope>...<id>``: lower case, ids last, at most eight tokens; a type and its version travel in a
header, never in the subject.
"""

import re
from typing import Literal

import msgspec

from headrace.messages.base import LONGEST_TOKEN, Count, Seconds

PREFIX = "hr"
DUPLICATES_S = 600.0
"""How long the broker refuses a message id again: twice the time for which a signature is valid."""
_TOKEN = re.compile(r"^[a-z0-9_-]+\Z")


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A family of subjects: template with ``{field}`` tokens, the message types on it, who publishes, who reads."""

    template: str
    types: tuple[str, ...]
    publishers: tuple[str, ...]
    readers: tuple[str, ...]
    note: str = ""

    def at(self, **fields: str | int) -> str:
        """The concrete subject. ValueError for a token that NATS or these rules do not allow.

        A field whose value holds dots (``<user hash>.<id>`` on the production lane) spreads over several tokens.
        """
        subject = self.template.format(**fields)
        tokens = subject.split(".")
        if len(tokens) > 8 or not all(_TOKEN.match(token) for token in tokens):
            raise ValueError(f"not a legal subject: {subject!r} (lower case, digits, '-' and '_', at most 8 tokens)")
        return subject

    def where(self, **fields: str | int) -> str:
        """A filter: fields that are not given become wildcards, the last one ``>``."""
        tokens = self.template.split(".")
        out: list[str] = []
        for index, token in enumerate(tokens):
            name = token.strip("{}")
            if not token.startswith("{"):
                out.append(token)
            elif name in fields:
                out.append(str(fields[name]))
            elif index == len(tokens) - 1:
                out.append(">")
            else:
                out.append("*")
        return ".".join(out)


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A JetStream stream: what it captures and how long it keeps it."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"] = "limits"
    discard: Literal["old", "new"] = "new"
    max_age_s: Seconds = 0.0
    """0 keeps for ever."""
    max_bytes: Count = 1 << 30
    duplicate_window_s: Seconds = DUPLICATES_S
    expiring: bool = False
    """Messages may carry an expiry of their own (``Nats-TTL``)."""
    once: bool = False
    """A subject holds one message, which no later one replaces."""
    queued_payloads_s: Seconds = 0.0
    """Of a work queue, whose records go when they are handled: how long their payloads live."""
    note: str = ""

    @property
    def payloads_s(self) -> float:
        """Seconds that payloads over 1 MiB of its records live at least; 0 where a purge removes them with the
        records."""
        return self.queued_payloads_s or self.max_age_s


_LIBRARY = ("every actor",)
_CALLERS = ("rollout", "judge", "certifier", "gateway", "feedback", "operator")

TASK = Subject(
    template="hr.task.{run}.{lane}.{suite}",
    types=("rollout_request",),
    publishers=("curriculum", "evaluator", "gateway", "rollout", "operator"),
    readers=("rollout",),
)
LEDGER = Subject(
    template="hr.ledger.{run}.{group}",
    types=("slot_issued", "fence"),
    publishers=("curriculum", "evaluator", "gateway", "feedback"),
    readers=("curriculum", "evaluator", "feedback", "audit"),
    note="groups `curriculum` and `evaluator` hold fences: writes name the newest of their own",
)
FAIL = Subject(
    template="hr.fail.{run}.{group}",
    types=("slot_failed",),
    publishers=("rollout", "judge", "feedback"),
    readers=("curriculum", "evaluator", "gateway", "audit"),
)
TRAJ = Subject(
    template="hr.traj.{run}.{group}",
    types=("trajectory",),
    publishers=("rollout", "feedback", "operator"),
    readers=("judge", "feedback", "gateway", "trainer", "replay"),
)
TURN = Subject(
    template="hr.turn.{run}.{trajectory}",
    types=("turn_sampled", "turn_done"),
    publishers=("rollout",),
    readers=("rollout", "gateway", "trainer", "feedback"),
    note="the trainer and feedback read it to purge",
)
SCORE = Subject(
    template="hr.score.{run}.{judge}.{group}",
    types=("score",),
    publishers=("judge", "feedback"),
    readers=("judge", "trainer", "curriculum", "evaluator", "audit"),
)
CLOSE = Subject(
    template="hr.close.{run}.{group}",
    types=("group_closed", "group_dropped", "staleness_bound", "fence"),
    publishers=("curriculum", "feedback"),
    readers=("trainer", "curriculum", "judge", "feedback", "audit"),
    note="every record is written on top of the last one of its run; a judge ends the group's shared machine",
)
WEIGHT_CHUNK = Subject(
    template="hr.weights.{run}.{version}.{shard}.{seq}",
    types=("weight_chunk",),
    publishers=("weight_sync",),
    readers=("weight_sync",),
)
WEIGHT_MANIFEST = Subject(
    template="hr.weights.{run}.{version}.manifest",
    types=("weight_manifest",),
    publishers=("weight_sync",),
    readers=("weight_sync", "trainer"),
)
WEIGHT_HEAD = Subject(
    template="hr.weights.{run}.head",
    types=("weight_head",),
    publishers=("weight_sync",),
    readers=("weight_sync", "rollout", "feedback", "trainer"),
    note="the trainer reads heads and manifests to collect",
)
BLOB = Subject(
    template="hr.blob.{digest}.{n}",
    types=(),
    publishers=_LIBRARY,
    readers=_LIBRARY,
    note="1 MiB chunks of any payload over 1 MiB; the message itself becomes a blob_ref",
)
STEP = Subject(
    template="hr.step.{run}",
    types=("step_manifest", "step_done", "step_failed", "records_purged", "fence"),
    publishers=("trainer",),
    readers=("trainer", "curriculum", "feedback", "replay", "dashboard", "audit"),
    note="every record is written on top of the last one of its run",
)
EVENT = Subject(
    template="hr.event.{run}.{actor}.{type}",
    types=(
        "snapshot_ready",
        "weights_staged",
        "weights_swapped",
        "eval_request",
        "eval_result",
        "promotion",
        "gate_verdict",
        "shadow_turn",
        "client_group",
        "bound_asked",
        "trainer_order",
        "certify_asked",
        "certificate",
        "tool_log",
        "token_gaps",
        "rejected",
        "event",
    ),
    publishers=_LIBRARY,
    readers=(
        "weight_sync",
        "rollout",
        "curriculum",
        "evaluator",
        "certifier",
        "feedback",
        "dead_letter",
        "dashboard",
        "audit",
    ),
    note="{type} is the message type; {actor} its publisher",
)
FEEDBACK = Subject(
    template="hr.feedback.{tenant}.{user}",
    types=("feedback",),
    publishers=("gateway", "operator"),
    readers=("feedback",),
)
FATE = Subject(
    template="hr.fate.{run}.{user}",
    types=("feedback_settled", "feedback_purged"),
    publishers=("feedback",),
    readers=("feedback", "audit"),
    note="the end of every rating; `purged` takes the place of a user in the records of purges",
)
ADVISORY = Subject(
    template="$JS.EVENT.ADVISORY.CONSUMER.{kind}.{stream}.{consumer}",
    types=("advisory",),
    publishers=("nats-server",),
    readers=("dead_letter",),
    note="written by the broker itself, as JSON",
)
DLQ = Subject(
    template="hr.dlq.{stream}.{consumer}",
    types=("dead_letter", "letter_settled"),
    publishers=("dead_letter", "operator", "feedback"),
    readers=("operators", "curriculum", "evaluator", "gateway", "feedback"),
    note="an operator records the decision about a letter, and sends its message again; feedback replaces letters of "
    "purged users by copies without content",
)
RPC = Subject(
    template="hr.rpc.{service}.{caller}.{method}",
    types=(
        *("acquire", "acquired", "sandbox_call", "sandbox_reply", "renew", "release", "release_group", "ping", "ack"),
        *("client_turn", "client_turn_part", "client_turn_done", "client_session_end"),
        *("purge_user", "readmit_user", "attempt_control"),
        *("search_request", "search_reply", "workspace_command", "workspace_report"),
    ),
    publishers=_CALLERS,
    readers=("environment", "rollout", "feedback", "search"),
    note="request and reply, never in a stream; {caller} is the role that asks, and the broker lets each role publish "
    "under its own alone (bus/broker/callers.py says who calls what). Any node of a run answers acquire-<run> of the "
    "environment; the rollout actors of the production lane answer turn-<run>, end-<run> and command-<run>, all of "
    "them listen on control-<run>; any search actor of a run answers query-<run>",
)
RPC_NODE = Subject(
    template="hr.rpc.{service}.{caller}.{node}.{method}",
    types=RPC.types,
    publishers=_CALLERS,
    readers=("environment", "search"),
    note="one node's own methods; all nodes that hold an image answer acquire-<run> under holds-<hash of its name>",
)
HEARTBEAT = Subject(template="hr.beat.{actor}.{id}", types=("beat",), publishers=_LIBRARY, readers=("dashboard",))
TRAFFIC = Subject(
    template="hr.traffic.{region}",
    types=("traffic",),
    publishers=("gateway", "rollout"),
    readers=("scavenger", "dashboard"),
)
METRIC = Subject(template="hr.metric.{actor}", types=("metric",), publishers=_LIBRARY, readers=("dashboard",))

SUBJECTS: dict[str, Subject] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Subject) and name.isupper()
}

_DAY = 86400.0

STREAMS: tuple[Stream, ...] = (
    Stream(
        name="HR_TASK",
        subjects=("hr.task.>",),
        retention="workqueue",
        discard="new",
        max_bytes=256 << 20,
        duplicate_window_s=3600.0,
        queued_payloads_s=60 * _DAY,  # a request that became a dead letter can be issued again for 30 days
        note="one durable per run and lane, rollout-<run>-<lane>; max_deliver 5",
    ),
    Stream(name="HR_LEDGER", subjects=("hr.ledger.>", "hr.fail.>"), note="kept: SlotIssued and SlotFailed"),
    Stream(
        name="HR_TRAJ",
        subjects=("hr.traj.>",),
        max_bytes=4 << 30,
        note="replay.keep_steps behind the trainer's last durable checkpoint",
    ),
    Stream(name="HR_TURN", subjects=("hr.turn.>",), max_bytes=4 << 30, note="replay.keep_steps"),
    Stream(
        name="HR_SCORE",
        subjects=("hr.score.>", "hr.close.>"),
        note="one order for scores and closings; scores keep_steps, closings kept",
    ),
    Stream(
        name="HR_WEIGHTS",
        subjects=("hr.weights.>",),
        max_bytes=8 << 30,
        note="at least three full chains; one mirror per region",
    ),
    Stream(
        name="HR_BLOB",
        subjects=("hr.blob.>",),
        max_bytes=8 << 30,
        expiring=True,
        once=True,
        note="claim checks, 1 MiB chunks; those of records as long as these (HR_TASK: 60 days), those of requests and "
        "answers two hours",
    ),
    Stream(name="HR_STEP", subjects=("hr.step.>",), note="kept: manifests and outcomes of steps"),
    Stream(name="HR_EVENT", subjects=("hr.event.>",), discard="old", max_age_s=14 * _DAY, note="14 days"),
    Stream(
        name="HR_FEEDBACK",
        subjects=("hr.feedback.>", "hr.fate.>"),
        max_age_s=90 * _DAY,
        note="90 days, purge by user",
    ),
    Stream(
        name="HR_ADVISORY",
        subjects=(
            "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
            "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
        ),
        discard="old",
        max_age_s=30 * _DAY,
        max_bytes=64 << 20,
        note="the server's advisories about messages that were given up",
    ),
    Stream(name="HR_DLQ", subjects=("hr.dlq.>",), discard="old", max_age_s=30 * _DAY, note="30 days"),
)

STREAM: dict[str, Stream] = {stream.name: stream for stream in STREAMS}

KEY_VALUES: dict[str, str] = {
    "HR_ADMISSION": "min_version per run; the curriculum writes it",
    "HR_RENDERER": "the renderer bundle of a run; the trainer writes it",
    "HR_PRODUCT": "promoted version, gate, branches, deny-list and certificates of purges; feedback writes it",
    "HR_SESSION": "open sessions of users with their prompts; only gateways read and write it",
    "HR_KEYS": "hashes of API keys, and sealed secrets of gateways and purges; the operator writes it",
    "HR_LEASE": "capacity leases; the revision is the fencing token; the scavenger writes it",
    "HR_PLUGINS": "hashes of the plugins of a run; every role writes under its own name",
    "HR_PRESENCE": "heartbeats of live actors; entries lapse after 15 s; every role writes under its own name",
}
"""A broker cannot fence single keys against headers or reads, so each bucket has one writing role, or keys that begin
with the role that writes them and no header that reaches beyond its own key."""


def stream_of(subject: str) -> Stream | None:
    """The stream that captures a subject or a filter; None for core subjects."""
    for stream in STREAMS:
        if any(covers(pattern, subject) for pattern in stream.subjects):
            return stream
    return None


_GROUP = {"ledger": 3, "fail": 3, "traj": 3, "turn": 3, "score": 4, "close": 3}
"""Kinds whose subjects end in a group or trajectory, and the token at which that begins."""


def owner(subject: str, message: object = None) -> str:
    """The hash of the user whose data a message carries; empty when it is nobody's. Groups of users are named
    ``<user>.<id>``, on the bus as in messages."""
    tokens = subject.split(".")
    if tokens[1:2] in (["feedback"], ["fate"]):
        return tokens[-1]
    begins = _GROUP.get(tokens[1], len(tokens)) if len(tokens) > 1 else 0
    if tokens[begins + 1 :]:
        return tokens[begins]
    return getattr(message, "group", "").rpartition(".")[0] if tokens[1:2] == ["task"] else ""


def covers(pattern: str, subject: str) -> bool:
    """Whether every subject that `subject` (a filter or a concrete one) stands for matches `pattern`."""
    want, have = pattern.split("."), subject.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or have[index] == ">" or (token != "*" and token != have[index]):
            return False
    return len(want) == len(have)


def token(text: str) -> str:
    """Any text as one legal subject token of at most `LONGEST_TOKEN` characters."""
    return re.sub(r"[^a-z0-9_-]+", "-", text[:LONGEST_TOKEN].lower()).strip("-")[:LONGEST_TOKEN] or "none"
