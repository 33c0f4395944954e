"""Who may publish and read what, derived from `messages.subjects`, in nats-server's words.

The idea: the table of subjects is the only source. A role may publish the subjects that name it as publisher, plus its
own beats, metrics, events, calls, acks and pulls, plus blobs; it may read streams of which it is a reader or a writer.
Purging is the trainer's and feedback's, deleting streams nobody's but the admin's, who declares them. Event subjects
are fenced by their {actor} token and by type, so that a judge cannot announce a snapshot in the trainer's name.

What it cannot do: NATS has no prefix wildcards inside a token, so two roles that read the same stream could touch each
other's durable consumers there; and who may make a consumer may make one that delivers old messages to a core subject
that somebody listens to (not into a stream: a stream's capture is no such interest).
"""

from collections.abc import Callable, Iterable

import msgspec

from headrace.messages import subjects as s

EVENT_TYPES: dict[str, tuple[str, ...]] = {
    "snapshot_ready": ("trainer",),
    "weights_staged": ("weight_sync",),
    "weights_swapped": ("rollout",),
    "eval_request": ("curriculum", "feedback", "evaluator", "operator"),
    "eval_result": ("evaluator",),
    "promotion": ("feedback", "operator"),
    "bound_asked": ("operator",),
    "tool_log": ("environment",),
}
"""Message types on HR_EVENT that only these roles may publish; every other type is everybody's."""

FREE_EVENTS = ("event", "rejected")

KV_WRITERS: dict[str, dict[str, str]] = {
    "HR_STATE": {
        "curriculum": "admission.>",
        "gateway": "*.session.>",
        "trainer": "trainer.>",
        "feedback": "feedback.>",
        "evaluator": "evaluator.>",
        "weight_sync": "weights.>",
    },
    "HR_LEASE": {"scavenger": ">"},
}
"""Who writes which keys of which bucket; HR_PRESENCE takes everyone under the role's own keys."""

PURGES: dict[str, tuple[str, ...]] = {
    "trainer": ("HR_TRAJ", "HR_TURN", "HR_SCORE", "HR_BLOB", "HR_WEIGHTS"),
    "feedback": ("HR_FEEDBACK", "HR_TRAJ", "HR_TURN", "HR_SCORE", "HR_BLOB"),
}

SERVICES: dict[str, tuple[str, ...]] = {"environment": ("environment",)}
"""Services that a role answers for besides the one of its own name."""

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
    "dead_letter",
)
READERS = ("dashboard", "operator", "replay")
LINK_ROLE = "region"
"""The connection of a region's broker to the hub's."""
REGIONAL = ("rollout", "environment", "judge", "weight_sync", "gateway", "scavenger", "dashboard", "operator")
"""Roles that may live in a region."""
ROLES = (*ACTORS, *READERS, "admin", LINK_ROLE)

_EVERYONE = "every actor"
_CORE = ("hr.rpc.", "hr.beat.", "hr.traffic.", "hr.metric.")


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Allow lists of one role; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    allow_responses: bool = True


def _read_api(stream: str, *, consumers: bool = True) -> list[str]:
    """API subjects for reading one stream."""
    out = [f"$JS.API.STREAM.MSG.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>"]
    if consumers:
        out += [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")]
        out += [f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>"]
    return out


def readable(role: str) -> dict[str, bool]:
    """Streams that a role may read, and whether it may make consumers there."""
    streams: dict[str, bool] = {"HR_BLOB": True, "HR_EVENT": True}
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
    return streams


def of(role: str) -> Permissions:
    """The permissions of a role. KeyError for a role that does not exist."""
    if role not in ROLES:
        raise KeyError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    if role == "admin":
        return Permissions(publish=(">",), subscribe=(">",), allow_responses=False)
    if role == LINK_ROLE:
        return _of_link()
    publish: list[str] = ["$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.FC.>"]
    for subject in s.SUBJECTS.values():
        if subject in (s.EVENT, s.BEAT, s.METRIC, s.RPC, s.RPC_NODE):
            continue
        if role in subject.publishers or (_EVERYONE in subject.publishers and role not in ("dashboard", "replay")):
            publish.append(subject.where())
    publish += [s.BEAT.where(actor=role), s.METRIC.where(actor=role), "hr.rpc.>"]
    own = [kind for kind, roles in EVENT_TYPES.items() if role in roles]
    publish += [s.EVENT.where(actor=role, type=kind) for kind in (*own, *FREE_EVENTS)]
    for stream, consumers in readable(role).items():
        publish += _read_api(stream, consumers=consumers)
    for bucket in s.KEY_VALUES:
        publish += _read_api(f"KV_{bucket}")
        keys = KV_WRITERS.get(bucket, {}).get(role)
        if keys is not None:
            publish.append(f"$KV.{bucket}.{keys}")
    publish.append(f"$KV.HR_PRESENCE.{role}.>")
    publish += [f"$JS.API.STREAM.PURGE.{stream}" for stream in PURGES.get(role, ())]
    if role == "dead_letter":
        names = [stream.name for stream in s.STREAMS]
        publish += [f"$JS.API.STREAM.MSG.GET.{name}" for name in names]
        publish += [
            f"$JS.API.STREAM.MSG.DELETE.{stream.name}" for stream in s.STREAMS if stream.retention == "workqueue"
        ]
    subscribe = [f"_INBOX.{role}.>", f"hr.rpc.{role}.>"]
    subscribe += [f"hr.rpc.{service}.>" for service in SERVICES.get(role, ()) if service != role]
    for subject in s.SUBJECTS.values():
        if subject.template.startswith(_CORE) and subject not in (s.RPC, s.RPC_NODE):
            if role in subject.readers or role in READERS:
                subscribe.append(subject.where())
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


def _of_link() -> Permissions:
    """What a region may send to the hub, and hear from it: what its actors do, but weights come from the hub alone.

    Whole patterns of streams: a broker tells its leaf of an interest only if the leaf may publish all that it covers.
    """
    publish: list[str] = ["_INBOX.>", "$JS.ACK.>", "$JS.FC.>"]
    publish += ["$JS.hub.API.CONSUMER.CREATE.HR_WEIGHTS", "$JS.hub.API.CONSUMER.DELETE.HR_WEIGHTS.*"]  # the mirror's
    subscribe: list[str] = ["_INBOX.>", "$JSC.R.>", "$JS.M.>"]
    for subject in s.SUBJECTS.values():
        stream = s.stream_of(subject.where())
        if stream is not None and stream.name != "HR_WEIGHTS" and {*REGIONAL, _EVERYONE} & set(subject.publishers):
            publish += [pattern for pattern in stream.subjects if s.covers(pattern, subject.where())]
    for role in REGIONAL:
        own = of(role)
        subscribe += own.subscribe
        for name in own.publish:
            if name.startswith("$KV."):
                publish.append(f"$JS.hub.API.{name}")
            elif name.startswith("$JS.API."):
                publish.append(name.replace("$JS.API.", "$JS.hub.API.", 1))
            elif name.startswith(_CORE):
                publish.append(name)
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def users_conf(public_keys: dict[str, str], permissions_of: Callable[[str], Permissions] = of) -> str:
    """The ``authorization`` block for nats-server: one NKEY user per role."""
    lines = ["# Made by headrace: one user per role, public keys only.", "authorization {", "  users: ["]
    for role, public in public_keys.items():
        permissions = permissions_of(role)
        lines += [f"    {{ nkey: {public}", f"      # {role}", "      permissions: {"]
        lines.append(f"        publish: {{ allow: [{', '.join(_quoted(permissions.publish))}] }}")
        lines.append(f"        subscribe: {{ allow: [{', '.join(_quoted(permissions.subscribe))}] }}")
        if permissions.allow_responses:
            lines.append('        allow_responses: { max: 1, expires: "10m" }')
        lines += ["      } }"]
    return "\n".join([*lines, "  ]", "}", ""])


def _quoted(values: Iterable[str]) -> list[str]:
    return [f'"{value}"' for value in values]
