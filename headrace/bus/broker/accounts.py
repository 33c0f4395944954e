"""The accounts of a broker: one of each stream and bucket, one of each role, and the imports that join them.

The idea: a permission says where a client may publish, and not what a reply subject names: the broker, a stream or
another client would publish there for it. So the streams lie where no client is. A role's account imports exactly its
row (`permissions.of`). A request that crosses into another account gets a reply subject of the broker's own (`_R_...`),
and its answer returns to the caller's account: to the caller's inbox, or, where the caller named another subject, at
most into its own row. A stream has an account of its own because a consumer may name a subject for its deliveries in
the body of a request, and acknowledgement subjects pass unchanged: both then reach that stream alone.

A role's account exports what it answers (`hr.rpc.<role>.`) and what others hear live. Runs that share a broker have all
of these accounts each, named `<run>.<name>`. Method: accounts, exports and imports of nats-server, as in its
documentation on multi-tenancy.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from headrace.bus.broker import permissions
from headrace.bus.broker.callers import IN_PARTS
from headrace.bus.broker.permissions import NAMES, ROLES, captured
from headrace.messages import subjects as s

ANSWER_S = 900
"""Seconds for which a service may answer a call; the longest are a command in an agent's workspace and a turn."""
PULL_S = 30
"""Seconds after its last message or heartbeat that a pull of a consumer ends; heartbeats come every five."""
_LIVE = ("hr.beat.", "hr.metric.", "hr.traffic.")


class Import(NamedTuple):
    """A subject of another account."""

    kind: str
    """service: requests and publishes go there. stream: its messages arrive here."""
    account: str
    subject: str


@cache
def imports(role: str) -> tuple[Import, ...]:
    """The row of a role, as its account imports it."""
    allowed = permissions.of(role)
    out = []
    for subject in allowed.publish:
        out += [Import("service", account, name) for account, name in _homes(subject)]
    for subject in allowed.subscribe:
        out += [Import("stream", account, name) for account, name in _origins(role, subject)]
    wanted = [each for each in dict.fromkeys(out) if each.account != role]
    return tuple(each for each in wanted if not any(_within(each, other) for other in wanted))


def _within(each: Import, other: Import) -> bool:
    """Whether another import has all of this one; with both a message would arrive twice."""
    return each != other and each[:2] == other[:2] and s.covers(other.subject, each.subject)


def _homes(subject: str) -> Iterator[tuple[str, str]]:
    """The accounts in which a published subject is handled, and the subject there; none for the role's own."""
    if subject.startswith("hr.rpc."):
        service = subject.split(".")[2]
        for role in ROLES if service == "*" else (service,):
            yield role, subject.replace(f".rpc.{service}.", f".rpc.{role}.", 1)
    elif subject == permissions.INFO:
        yield "HR_WEIGHTS", subject
    elif subject.startswith("$JS."):
        tokens = subject.split(".")
        yield next(name for name in NAMES if name in tokens), subject
    elif subject.startswith("$KV."):
        yield f"KV_{subject.split('.')[1]}", subject
    elif stream := s.stream_of(subject):
        yield stream.name, subject


def _origins(role: str, subject: str) -> Iterator[tuple[str, str]]:
    """The accounts from which a subscription hears messages, and their subjects."""
    if subject.startswith("_INBOX.") or subject.startswith("hr.rpc."):
        return
    if subject.startswith("hr.copy."):
        yield subject.split(".")[2], subject
        return
    for other in ROLES:
        if other in (role, "admin"):
            continue
        for published in permissions.of(other).publish:
            common = overlap(published, subject)
            if common:
                yield other, common


def overlap(one: str, other: str) -> str:
    """The filter of the subjects that two filters share; empty when there are none."""
    out: list[str] = []
    first, second = one.split("."), other.split(".")
    for index in range(max(len(first), len(second))):
        a = first[index] if index < len(first) else ""
        b = second[index] if index < len(second) else ""
        if ">" in (a, b):
            rest = second[index:] if a == ">" else first[index:]
            return ".".join([*out, *rest]) if rest else ""
        if not a or not b or (a != b and "*" not in (a, b)):
            return ""
        out.append(b if a == "*" else a)
    return ".".join(out)


def conf(runs: Mapping[str, Mapping[str, str]]) -> str:
    """The ``accounts`` block for nats-server.

    runs: run to role to public key; the run's name is empty on a broker that holds one. The accounts follow from the
    key that a client signs in with, so no actor knows that there are accounts.
    """
    lines = ["# Made by headrace: one account per stream and role, one user per role, public keys only.", "accounts {"]
    for run, public_keys in runs.items():
        prefix = f"{run}." if run else ""
        for stream in NAMES:
            lines += of_stream(stream, prefix)
        for role, public in public_keys.items():
            lines += of_role(role, user(role, public, permissions.of(role)), imports(role), prefix)
    return "\n".join([*lines, "}", ""])


def of_stream(stream: str, prefix: str = "", extra: Iterable[str] = ()) -> list[str]:
    """The account of a stream or bucket. It has no users. extra: further services."""
    api = [f"$JS.API.STREAM.*.{stream}", f"$JS.API.STREAM.*.*.{stream}"]
    api += [f"$JS.API.CONSUMER.{verb}.{stream}" for verb in ("CREATE", "LIST", "NAMES")]
    api += [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "INFO", "DELETE", "LEADER.STEPDOWN")]
    api += [f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>"]
    api += [f"$JS.SNAPSHOT.*.{stream}.>", *permissions.acknowledged(stream)]
    api += [permissions.INFO, "$JS.FC.HR_WEIGHTS.>"] if stream == "HR_WEIGHTS" else []
    lines = [f'  "{prefix}{stream}" {{', "    jetstream: enabled", "    exports: ["]
    if stream != "HR_ADVISORY":
        lines += [f'      {{ service: "{subject}" }}' for subject in captured(stream)]
    lines += [f'      {{ service: "{subject}" }}' for subject in (*api, *extra)]
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>"
    lines.append(f'      {{ service: "{pull}", response_type: stream, threshold: "{PULL_S}s" }}')
    heard = [
        permissions.COPIES.format(stream),
        *_advisories(stream),
        *(["hr.mirror.>"] if stream == "HR_WEIGHTS" else []),
    ]
    lines += [f'      {{ stream: "{subject}" }}' for subject in heard]
    lines.append("    ]")
    if stream == "HR_ADVISORY":
        told = [Import("stream", name, subject) for name in NAMES for subject in _advisories(name)]
        lines += _imported(told, prefix)
    return [*lines, "  }"]


def _advisories(stream: str) -> list[str]:
    """The broker's subjects about messages of a stream that were given up, which HR_ADVISORY stores."""
    if stream == "HR_ADVISORY" or not any(stream in streams for streams in permissions.DURABLES.values()):
        return []
    return [f"{subject.removesuffix('>')}{stream}.>" for subject in s.STREAM["HR_ADVISORY"].subjects]


def of_role(
    role: str,
    users: Iterable[str],
    wanted: Iterable[Import],
    prefix: str = "",
    mappings: Mapping[str, str] | None = None,
) -> list[str]:
    """The account of a role, with its users and imports. mappings: subject to the one that takes its place."""
    lines = [f'  "{prefix}{role}" {{', "    users: [", *users, "    ]", "    exports: ["]
    lines.append(f'      {{ service: "hr.rpc.{role}.>", threshold: "{ANSWER_S}s" }}')
    if caller := IN_PARTS.get(role):
        calls = s.RPC.where(service=role, caller=caller)
        lines.append(f'      {{ service: "{calls}", response_type: stream, threshold: "{ANSWER_S}s" }}')
    lines += [f'      {{ stream: "{subject}" }}' for subject in _heard(role)]
    lines.append("    ]")
    lines += _imported(wanted, prefix)
    if mappings:
        pairs = [f'      "{source}": "{target.replace("*", "$1")}"' for source, target in mappings.items()]
        lines += ["    mappings {", *pairs, "    }"]
    return [*lines, "  }"]


def _heard(role: str) -> list[str]:
    """Subjects of a role that other accounts hear live."""
    wanted = (each for other in ROLES for each in imports(other))
    said = {each.subject for each in wanted if each.kind == "stream" and each.account == role}
    return sorted(said)


def _imported(wanted: Iterable[Import], prefix: str) -> list[str]:
    lines = ["    imports: ["]
    for each in wanted:
        share = ", share: true" if each.subject.startswith("$JS.API.") else ""
        home = f'account: "{prefix}{each.account}", subject: "{each.subject}"'
        lines.append(f"      {{ {each.kind}: {{ {home} }}{share} }}")
    return [*lines, "    ]"]


def user(name: str, public: str, allowed: permissions.Permissions) -> list[str]:
    """A user of an account, who signs in with a key."""
    lines = [f"      {{ nkey: {public}", f"        # {name}"]
    if allowed.connections:
        lines.append(f"        allowed_connection_types: [{', '.join(_quoted(allowed.connections))}]")
    publish = f"allow: [{', '.join(_quoted(allowed.publish))}]" if allowed.publish else 'deny: [">"]'
    lines += ["        permissions: {", f"          publish: {{ {publish} }}"]
    lines.append(f"          subscribe: {{ allow: [{', '.join(_quoted(allowed.subscribe))}] }}")
    return [*lines, "        } }"]


def _quoted(values: Iterable[str]) -> list[str]:
    return [f'"{value}"' for value in values]
