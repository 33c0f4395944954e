"""The permissions of every role, derived from `messages.subjects` and written as nats-server reads them.

The idea: the table of subjects is the only source, and everything that is not allowed is denied. A role may publish on
the subjects that name it as publisher, on its own heartbeat, metric and event subjects, on calls and on blobs. It may
read the streams of which it is a reader or a publisher, and the buckets that `BUCKETS` gives it. Only the trainer and
feedback purge, only the admin creates and deletes streams. Event subjects are fenced by their {actor} token and by
type, so that a judge cannot announce a snapshot in the trainer's name. Lanes and users' groups are fenced where the
subject shows them (`NARROWER`).

These lists hold inside one account. Runs that share a broker get an account each (`accounts_conf`): streams, buckets,
consumers and purges of one run do not exist for another. docs/permissions.md is the whole matrix, generated, with the
list of what NATS cannot fence.
"""

from collections.abc import Callable, Iterable

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
    "bound_asked": ("operator",),
    "certify_asked": ("curriculum",),
    "certificate": ("certifier",),
    "tool_log": ("environment",),
    "token_gaps": ("trainer",),
}
"""Message types on HR_EVENT that only these roles may publish; every role may publish the other types."""

FREE_EVENTS = ("event", "rejected")

KV_WRITERS: dict[str, dict[str, str]] = {
    "HR_STATE": {
        "curriculum": "admission.>",
        "trainer": "trainer.>",
        "feedback": "feedback.>",
        "evaluator": "evaluator.>",
        "weight_sync": "weights.>",
        "operator": "search.>",
    },
    "HR_SESSION": {"gateway": "*.session.>"},
    "HR_LEASE": {"scavenger": ">"},
}
"""Bucket to role to the keys that the role may write; in HR_PRESENCE every role writes the keys under its own name."""

KV_READERS: dict[str, tuple[str, ...]] = {
    "HR_STATE": (
        *("curriculum", "rollout", "judge", "trainer", "evaluator", "feedback", "weight_sync", "gateway"),
        *("environment", "search", "dashboard", "operator", "replay"),
    ),
    "HR_SESSION": ("gateway",),
    "HR_LEASE": ("scavenger", "rollout", "dashboard", "operator"),
    "HR_PRESENCE": ("curriculum", "dead_letter", "dashboard", "operator"),
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
    "certifier",
    "dead_letter",
    "search",
)
READERS = ("dashboard", "operator", "replay")
LINK_ROLE = "region"
"""The connection of a region's broker to the hub's."""
WEB_ROLE = "web"
"""The page in an operator's browser, over WebSocket. Its seed leaves the machine with the page, so the role may only
read, and only records without users' data."""
CALLOUT_ROLE = "callout"
"""The auth service of a gateway (gateway/tenants/callout.py); on brokers that are open to tenants."""
REGIONAL = (
    *("rollout", "environment", "search", "judge", "weight_sync", "gateway", "scavenger"),
    *("dashboard", "operator"),
)
"""Roles that may live in a region."""
ROLES = (*ACTORS, *READERS, "admin", LINK_ROLE, WEB_ROLE)

_EVERYONE = "every actor"
_CORE = ("hr.rpc.", "hr.beat.", "hr.traffic.", "hr.metric.")


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Allow lists of one role; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    allow_responses: bool = True
    connections: tuple[str, ...] = ()
    """Kinds of connections; empty allows every kind."""


def _read_api(stream: str, *, consumers: bool = True) -> list[str]:
    """API subjects for reading one stream."""
    out = [f"$JS.API.STREAM.MSG.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>"]
    if consumers:
        out += [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")]
        out += [f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>"]
    return out


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
    return streams


def of(role: str) -> Permissions:
    """The permissions of a role. KeyError for a role that does not exist."""
    if role == CALLOUT_ROLE:
        return Permissions(publish=("$JS.FC.>",), subscribe=("$SYS.REQ.USER.AUTH", f"_INBOX.{CALLOUT_ROLE}.>"))
    if role not in ROLES:
        raise KeyError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    if role == "admin":
        return Permissions(publish=(">",), subscribe=(">",), allow_responses=False)
    if role == LINK_ROLE:
        return _of_link()
    if role == WEB_ROLE:
        return _of_web()
    publish: list[str] = ["$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.FC.>"]
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
        publish += _read_api(stream, consumers=consumers)
        if role == "operator" and consumers:
            # Other clients create consumers with several filters here: the filters are in the request, not the subject.
            publish.append(f"$JS.API.CONSUMER.CREATE.{stream}")
    for bucket in s.KEY_VALUES:
        if role in KV_READERS[bucket]:
            publish += _read_api(f"KV_{bucket}")
        keys = KV_WRITERS.get(bucket, {}).get(role)
        if keys is not None:
            publish.append(f"$KV.{bucket}.{keys}")
    publish.append(f"$KV.HR_PRESENCE.{role}.>")
    if role in ACTORS:
        publish.append("$KV.HR_STATE.plugins.>")  # bus/runtime/plugins.py
    publish += [f"$JS.API.STREAM.PURGE.{stream}" for stream in PURGES.get(role, ())]
    for stream in ERASES.get(role, ()):
        publish += [f"$JS.API.STREAM.MSG.{verb}.{stream}" for verb in ("GET", "DELETE")]
        publish.append(f"$JS.API.CONSUMER.INFO.{stream}.>")
    if role == "dead_letter":
        names = [stream.name for stream in s.STREAMS]
        publish += [f"$JS.API.STREAM.MSG.GET.{name}" for name in names]
        publish += [
            f"$JS.API.STREAM.MSG.DELETE.{stream.name}" for stream in s.STREAMS if stream.retention == "workqueue"
        ]
    subscribe = [f"_INBOX.{role}.>", f"hr.rpc.{role}.>"]
    subscribe += [f"hr.rpc.{service}.>" for service in SERVICES.get(role, ()) if service != role]
    if role in s.TENANT.readers:
        subscribe.append(s.TENANT.where())
    for subject in s.SUBJECTS.values():
        if subject.template.startswith(_CORE) and subject not in (s.RPC, s.RPC_NODE):
            if role in subject.readers or role in READERS:
                subscribe.append(subject.where())
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


def _of_web() -> Permissions:
    """Permissions of the live page: history of streams without users' data by direct get, live records by subject.

    It makes no consumers: a push consumer delivers to any subject that its creator names, so its creator could write.
    The subjects of users' groups have one more token, so no filter here matches them.
    """
    subscribe = [s.HEARTBEAT.where(), s.METRIC.where(), s.TRAFFIC.where(), "hr.step.*", "hr.score.*.*.*"]
    subscribe += ["hr.close.*.*", "hr.ledger.*.*", "hr.fail.*.*"]
    subscribe += [f"hr.event.*.*.{kind}" for kind in ("event", "eval_result", "weights_swapped", "promotion")]
    return Permissions(
        publish=("$JS.API.DIRECT.GET.HR_STEP", "$JS.API.DIRECT.GET.KV_HR_PRESENCE"),
        subscribe=(f"_INBOX.{WEB_ROLE}.>", *subscribe),
        allow_responses=False,
        connections=("WEBSOCKET",),
    )


def _of_link() -> Permissions:
    """Permissions of a region at the hub: those of its actors, except that only the hub publishes
    weights.

    The lists hold whole patterns of streams, because a broker announces an interest to its leaf only if the leaf may
    publish all of it.
    """
    publish: list[str] = ["_INBOX.>", "$JS.ACK.>", "$JS.FC.>"]
    publish += ["$JS.hub.API.CONSUMER.CREATE.HR_WEIGHTS", "$JS.hub.API.CONSUMER.DELETE.HR_WEIGHTS.*"]  # the mirror's
    subscribe: list[str] = ["_INBOX.>", "$JSC.R.>", "$JS.M.>"]
    for subject in s.SUBJECTS.values():
        stream = s.stream_of(subject.where())
        if stream is not None and stream.name != "HR_WEIGHTS" and {*REGIONAL, _EVERYONE} & set(subject.publishers):
            publish += [pattern for pattern in stream.subjects if s.covers(pattern, subject.where())]
    for role in REGIONAL:
        permissions = of(role)
        subscribe += permissions.subscribe
        for name in permissions.publish:
            if name.startswith("$KV."):
                publish.append(f"$JS.hub.API.{name}")
            elif name.startswith("$JS.API."):
                publish.append(name.replace("$JS.API.", "$JS.hub.API.", 1))
            elif name.startswith(_CORE):
                publish.append(name)
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


class Tenants(msgspec.Struct, frozen=True):
    """The public keys of a broker that is open to tenants."""

    issuer: str
    """Of the account that signs the users of tenants."""
    callout: str
    """Of the auth service."""

    def conf(self, public_keys: Iterable[str], account: str = "") -> list[str]:
        """The lines of the auth callout. public_keys: users that the broker decides on itself."""
        lines = ["  auth_callout {", f"    issuer: {self.issuer}"]
        lines += [f"    account: {account}"] if account else []
        return [*lines, f"    auth_users: [{', '.join([*public_keys, self.callout])}]", "  }"]


def accounts_conf(runs: dict[str, dict[str, str]], tenants: Tenants | None = None) -> str:
    """The ``accounts`` block for nats-server: an account with its own JetStream for every run, and its users.

    runs: run to role to public key. The account follows from the key that a client signs in with, so no actor knows
    that there are accounts. Accounts export nothing to each other. With `tenants` the auth service has an account too.
    """
    lines = ["# Made by headrace: one account per run, one user per role, public keys only.", "accounts {"]
    for run, public_keys in runs.items():
        lines += [f"  {run} {{", "    jetstream: enabled", "    users: ["]
        lines += [f"  {line}" for role, public in public_keys.items() for line in _user(role, public, of(role))]
        lines += ["    ]", "  }"]
    if tenants is None:
        return "\n".join([*lines, "}", ""])
    lines += [f"  {CALLOUT_ROLE} {{", "    users: ["]
    lines += [f"  {line}" for line in _user(CALLOUT_ROLE, tenants.callout, of(CALLOUT_ROLE))]
    every = [public for public_keys in runs.values() for public in public_keys.values()]
    lines += ["    ]", "  }", "}", "authorization {", *tenants.conf(every, CALLOUT_ROLE)]
    return "\n".join([*lines, "}", ""])


def users_conf(
    public_keys: dict[str, str],
    permissions_of: Callable[[str], Permissions] = of,
    tenants: Tenants | None = None,
) -> str:
    """The ``authorization`` block for nats-server: one NKEY user per role, and the auth service of `tenants`."""
    lines = ["# Made by headrace: one user per role, public keys only.", "authorization {", "  users: ["]
    for role, public in public_keys.items():
        lines += _user(role, public, permissions_of(role))
    if tenants is None:
        return "\n".join([*lines, "  ]", "}", ""])
    lines += [*_user(CALLOUT_ROLE, tenants.callout, of(CALLOUT_ROLE)), "  ]", *tenants.conf(public_keys.values())]
    return "\n".join([*lines, "}", ""])


def _user(role: str, public: str, permissions: Permissions) -> list[str]:
    lines = [f"    {{ nkey: {public}", f"      # {role}"]
    if permissions.connections:
        lines.append(f"      allowed_connection_types: [{', '.join(_quoted(permissions.connections))}]")
    lines.append("      permissions: {")
    lines.append(f"        publish: {{ allow: [{', '.join(_quoted(permissions.publish))}] }}")
    lines.append(f"        subscribe: {{ allow: [{', '.join(_quoted(permissions.subscribe))}] }}")
    if permissions.allow_responses:
        lines.append('        allow_responses: { max: 1, expires: "10m" }')
    return [*lines, "      } }"]


def _quoted(values: Iterable[str]) -> list[str]:
    return [f'"{value}"' for value in values]
