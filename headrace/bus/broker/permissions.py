"""The permissions of every role, derived from `messages.subjects`: subjects to publish on and to subscribe to.

The idea: the table of subjects is the only source, and everything that is not allowed is denied. A role may publish on
the subjects that name it as publisher, on its own heartbeat, metric and event subjects, on calls and on blobs. It may
read the streams of which it is a reader or a publisher, and the buckets that `KV_READERS` gives it. Only the trainer
and feedback purge, only the admin creates and deletes streams. Event subjects are fenced by their {actor} token and by
type, so that a judge cannot announce a snapshot in the trainer's name. Lanes and users' groups are fenced where the
subject shows them (`NARROWER`).

`accounts` turns these lists into the accounts of a broker, in which a role reaches nothing else: neither directly nor
by the reply subject of a request. docs/permissions.md is the whole matrix, generated, with what an attacker with the
seed of a role can still do.
"""

from collections.abc import Iterable

import msgspec

from headrace.bus.broker import callers
from headrace.messages import subjects as s

EVENT_TYPES: dict[str, tuple[str, ...]] = {
    "snapshot_ready": ("trainer",),
    "weights_staged": ("weight_sync",),
    "weights_swapped": ("rollout",),
    "eval_request": ("curriculum", "feedback", "evaluator", "operator"),
    "eval_result": ("evaluator",),
    "promotion": ("feedback", "operator"),
    "gate_verdict": ("feedback",),
    "shadow_turn": ("gateway",),
    "client_group": ("feedback",),
    "bound_asked": ("operator",),
    "trainer_order": ("operator",),
    "certify_asked": ("curriculum",),
    "certificate": ("certifier",),
    "tool_log": ("environment",),
    "token_gaps": ("trainer",),
}
"""Message types on HR_EVENT that only these roles may publish; every role may publish the other types."""

FREE_EVENTS = ("event", "rejected")

KV_WRITERS: dict[str, str] = {
    "HR_ADMISSION": "curriculum",
    "HR_RENDERER": "trainer",
    "HR_PRODUCT": "feedback",
    "HR_SESSION": "gateway",
    "HR_KEYS": "operator",
    "HR_LEASE": "scavenger",
}
"""Bucket to the one role that writes it. In the other buckets every role writes the keys under its own name."""

_WATCH = ("dashboard", "operator", "replay")
KV_READERS: dict[str, tuple[str, ...]] = {
    "HR_ADMISSION": ("curriculum", "rollout", *_WATCH),
    "HR_RENDERER": ("rollout", "trainer", *_WATCH),
    "HR_PRODUCT": ("trainer", "rollout", "gateway", "feedback", *_WATCH),
    "HR_SESSION": ("gateway",),
    "HR_KEYS": ("gateway", "feedback", "operator"),
    "HR_LEASE": ("scavenger", "rollout", "dashboard", "operator"),
    "HR_PLUGINS": ("curriculum", "rollout", "environment", "judge", "trainer", "search", "operator", "replay"),
    "HR_PRESENCE": ("curriculum", "dead_letter", "feedback", "dashboard", "operator"),
}
"""Bucket to the roles that may read it. A broker cannot fence single keys of a bucket, so users' prompts have a bucket
of their own."""

NARROWER: dict[str, dict[str, tuple[str, ...]]] = {
    "curriculum": {s.TASK.template: (s.TASK.where(lane="train"),)},
    "evaluator": {s.TASK.template: (s.TASK.where(lane="eval"),)},
    "gateway": {
        s.TASK.template: (s.TASK.where(lane="production"),),
        s.LEDGER.template: ("hr.ledger.*.*.*",),  # groups of users have two tokens: <user hash>.<id>
    },
    "feedback": {  # sessions of users alone: the groups of training have one token
        s.LEDGER.template: ("hr.ledger.*.*.*",),
        s.TRAJ.template: ("hr.traj.*.*.*",),
        s.SCORE.template: ("hr.score.*.*.*.*",),
        s.CLOSE.template: ("hr.close.*.*.*",),
        s.FAIL.template: ("hr.fail.*.*.*",),
    },
}
"""Role to template to filters, for publishers that may not publish the whole family."""

NO_BLOBS = ("scavenger",)
"""Roles that never write or read a message over 1 MiB."""

PURGES: dict[str, tuple[str, ...]] = {
    "trainer": ("HR_TRAJ", "HR_TURN", "HR_SCORE", "HR_BLOB", "HR_WEIGHTS"),
    "feedback": ("HR_FEEDBACK", "HR_TRAJ", "HR_TURN", "HR_SCORE", "HR_BLOB", "KV_HR_SESSION"),
}

ERASES: dict[str, tuple[str, ...]] = {"feedback": ("HR_TASK", "HR_EVENT", "HR_DLQ")}
"""Role to the streams in which it deletes single records: a user's, which no subject names there."""

DURABLES: dict[str, tuple[str, ...]] = {
    "rollout": ("HR_TASK",),
    "judge": ("HR_TRAJ",),
    "feedback": ("HR_EVENT",),
    "dead_letter": ("HR_ADVISORY", "HR_EVENT"),
}
"""Role to the streams of which it acknowledges messages."""

ACTORS = (
    "curriculum",
    "rollout",
    "environment",
    "judge",
    "trainer",
    "weight_sync",
    "gateway",
    "feedback",
    "scavenger",
    "evaluator",
    "certifier",
    "dead_letter",
    "search",
)
READERS = ("dashboard", "operator", "replay")
WEB_ROLE = "web"
"""The page in an operator's browser, over WebSocket. Its seed leaves the machine with the page, so the role may only
subscribe, and only to records without users' data."""
REGIONAL = (
    *("rollout", "environment", "search", "judge", "weight_sync", "gateway", "scavenger"),
    *("dashboard", "operator"),
)
"""Roles that may live in a region."""
ROLES = (*ACTORS, *READERS, "admin", WEB_ROLE)

_EVERYONE = "every actor"
_CORE = ("hr.rpc.", "hr.beat.", "hr.traffic.", "hr.metric.")


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Allow lists of one role; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    connections: tuple[str, ...] = ()
    """Kinds of connections; empty allows every kind."""


def _api(stream: str, *verbs: str) -> list[str]:
    return [f"$JS.API.{verb.format(stream)}" for verb in verbs]


_GET = ("STREAM.MSG.GET.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>")
_CONSUME = ("STREAM.INFO.{}", *(f"CONSUMER.{verb}.{{}}.>" for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")))
_DECLARE = (
    *(f"STREAM.{verb}.{{}}" for verb in ("CREATE", "UPDATE", "DELETE", "INFO", "PURGE", "SNAPSHOT", "RESTORE")),
    *("STREAM.MSG.DELETE.{}", "STREAM.LEADER.STEPDOWN.{}", "CONSUMER.CREATE.{}", "CONSUMER.LIST.{}"),
    *("CONSUMER.NAMES.{}", "CONSUMER.LEADER.STEPDOWN.{}.>"),
)
INFO = "$JS.API.INFO"
"""Answered by the account of HR_WEIGHTS. A role that did not import it would get the broker's own API, which answers
every request first with an error."""
COPIES = "hr.copy.{}.>"
"""Where the chunks of a stream's backup arrive."""


def readable(role: str) -> dict[str, bool]:
    """Streams that a role may read, and whether it may make consumers there."""
    streams: dict[str, bool] = {"HR_EVENT": True}
    if role not in NO_BLOBS:
        streams["HR_BLOB"] = role in READERS
    if role in s.ADVISORY.readers:  # its two kinds are subjects of their own in the stream
        streams["HR_ADVISORY"] = True
    for subject in s.SUBJECTS.values():
        stream = s.stream_of(subject.where())
        if stream is None:
            continue
        reads = role in subject.readers or role == "operator" or (role in READERS and stream.name != "HR_FEEDBACK")
        writes = role in subject.publishers
        consumers = role in subject.readers or stream.retention != "workqueue"
        if reads or writes:
            streams[stream.name] = streams.get(stream.name, False) or consumers
    streams |= {f"KV_{bucket}": True for bucket, readers in KV_READERS.items() if role in readers}
    return streams


def of(role: str) -> Permissions:
    """The permissions of a role. KeyError for a role that does not exist."""
    if role not in ROLES:
        raise KeyError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    if role == "admin":
        return _of_admin()
    if role == WEB_ROLE:
        return _of_web()
    publish: list[str] = [INFO]
    for subject in s.SUBJECTS.values():
        if subject in (s.EVENT, s.HEARTBEAT, s.METRIC, s.RPC, s.RPC_NODE):
            continue
        if subject == s.BLOB and role in NO_BLOBS:
            continue
        if role in subject.publishers or (_EVERYONE in subject.publishers and role not in ("dashboard", "replay")):
            publish += NARROWER.get(role, {}).get(subject.template, (subject.where(),))
    publish += [s.HEARTBEAT.where(actor=role), s.METRIC.where(actor=role), *callers.filters(role)]
    restricted_kinds = [kind for kind, roles in EVENT_TYPES.items() if role in roles]
    publish += [s.EVENT.where(actor=role, type=kind) for kind in (*restricted_kinds, *FREE_EVENTS)]
    for stream, consumers in readable(role).items():
        publish += _api(stream, *_GET, *(_CONSUME if consumers else ()))
        if stream != "HR_BLOB":  # what lies there is listed by an information request
            publish += _api(stream, "STREAM.INFO.{}")
        if role == "operator" and consumers:
            # Other clients create consumers with several filters here: the filters are in the request, not the subject.
            publish += _api(stream, "CONSUMER.CREATE.{}")
    for stream in DURABLES.get(role, ()):
        publish += acknowledged(stream)
    for bucket in s.KEY_VALUES:
        if bucket not in KV_WRITERS:
            publish.append(f"$KV.{bucket}.{role}.>")
        elif KV_WRITERS[bucket] == role:
            publish.append(f"$KV.{bucket}.>")
    for stream in PURGES.get(role, ()):
        publish += _api(stream, "STREAM.PURGE.{}", "STREAM.INFO.{}")
    for stream in ERASES.get(role, ()):
        publish += _api(stream, "STREAM.INFO.{}", "STREAM.MSG.GET.{}", "STREAM.MSG.DELETE.{}", "CONSUMER.INFO.{}.>")
    if role == "operator":  # counts a user's sessions, to check a purge
        publish += _api("KV_HR_SESSION", "STREAM.INFO.{}")
    if role == "dead_letter":
        for each in s.STREAMS:
            publish += _api(each.name, "STREAM.MSG.GET.{}", "STREAM.INFO.{}")
            publish += _api(each.name, "STREAM.MSG.DELETE.{}") if each.retention == "workqueue" else []
    publish.append(ANSWERS)
    subscribe = [f"_INBOX.{role}.>", f"hr.rpc.{role}.>"]
    for subject in s.SUBJECTS.values():
        if subject.template.startswith(_CORE) and subject not in (s.RPC, s.RPC_NODE):
            if role in subject.readers or role in READERS:
                subscribe.append(subject.where())
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


ANSWERS = "_R_.>"
"""Reply subjects as the broker writes them into a request that crosses from the caller's account to that of the
service. An answer on one returns to the caller's account, whatever the caller named; other answers are refused."""


def acknowledged(stream: str) -> list[str]:
    """Subjects on which messages of a stream's durable consumers are acknowledged."""
    return [f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>"]


def captured(stream: str) -> tuple[str, ...]:
    """The subjects that a stream or a bucket captures."""
    if stream in s.STREAM:
        return s.STREAM[stream].subjects
    return (f"$KV.{stream.removeprefix('KV_')}.>",)


def _of_admin() -> Permissions:
    """Permissions of the admin: everything about every stream and bucket, as anybody."""
    publish, subscribe = [INFO], ["_INBOX.admin.>", "hr.rpc.admin.>"]
    for stream in NAMES:
        publish += captured(stream) if stream != "HR_ADVISORY" else ()
        publish += [*_api(stream, *_GET, *_CONSUME, *_DECLARE), *acknowledged(stream)]
        publish += [f"$JS.SNAPSHOT.ACK.{stream}.>", f"$JS.SNAPSHOT.RESTORE.{stream}.>"]
        subscribe.append(COPIES.format(stream))
    publish += ["hr.rpc.*.>", "hr.beat.>", "hr.metric.>", "hr.traffic.>", ANSWERS]
    subscribe += [s.HEARTBEAT.where(), s.METRIC.where(), s.TRAFFIC.where()]
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


def _of_web() -> Permissions:
    """Permissions of the live page: live records by subject, and nothing that it could publish.

    The subjects of users' groups have one more token, so no filter here matches them.
    """
    subscribe = [s.HEARTBEAT.where(), s.METRIC.where(), s.TRAFFIC.where(), "hr.step.*", "hr.score.*.*.*"]
    subscribe += ["hr.close.*.*", "hr.ledger.*.*", "hr.fail.*.*"]
    subscribe += [f"hr.event.*.*.{kind}" for kind in ("event", "eval_result", "weights_swapped", "promotion")]
    return Permissions(publish=(), subscribe=tuple(subscribe), connections=("WEBSOCKET",))


NAMES = (*(stream.name for stream in s.STREAMS), *(f"KV_{name}" for name in s.KEY_VALUES))
"""Every stream that a broker must have; a bucket is a stream too."""


def known(role: str) -> tuple[str, ...]:
    """The streams about which a role may ask."""
    allowed = of(role).publish
    return tuple(name for name in NAMES if f"$JS.API.STREAM.INFO.{name}" in allowed)


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
