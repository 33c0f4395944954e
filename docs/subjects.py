"""Writes docs/subjects.md and docs/permissions.md, the tables of subjects, streams and roles (`make docs`).

The power of each role's seed in the hands of an attacker is made from the tables that readers check signatures with;
the sentences say what follows.
"""

import re
from pathlib import Path

from headrace.bus import signatures
from headrace.bus.broker import permissions
from headrace.bus.broker.callers import CALLERS, PING, PINGING
from headrace.bus.broker.permissions import ACTORS, EVENT_TYPES, KV_READERS, KV_WRITERS, PURGES, READERS
from headrace.messages import subjects as s

DOCS = Path(__file__).resolve().parent
ROLES = (*ACTORS, *READERS)
STILL: dict[str, str] = {
    "every role with HR_EVENT": (
        "delete, reset or exhaust the durable consumers of feedback and dead_letter on HR_EVENT: "
        "messages come again or late"
    ),
    "readers and writers of HR_TRAJ": (
        "the same with the judge's durable consumer; who writes HR_TRAJ too (rollout, feedback, "
        "operator) can settle its messages"
    ),
    "rollout": (
        "take, settle or drop any request of HR_TASK; read the streams of other attempts; take the "
        "machines that are not reserved for the judge"
    ),
    "judge, certifier": "take every free machine",
    "feedback": (
        "purge all of HR_FEEDBACK, HR_TRAJ, HR_TURN, HR_SCORE, HR_BLOB and HR_SESSION: the filter is "
        "in the request; delete single records of HR_TASK, HR_EVENT and HR_DLQ"
    ),
    "trainer": "purge all of HR_TRAJ, HR_TURN, HR_SCORE, HR_BLOB and HR_WEIGHTS",
    "dead_letter": "read single records of every stream; delete messages of HR_TASK",
    "gateway": "read prompts of users (HR_SESSION), and open attempts in any user's name",
    "who writes HR_BLOB": (
        "take the name of a payload that it knows before its writer stores it: the writer then finds other bytes"
    ),
    "who writes a stream": (
        "use a message id first that another writer will use (its record is then dropped as a "
        "repeat); fill the stream up to its limit"
    ),
    "dashboard, operator, replay": (
        "read what runs store except ratings (operator: those too); operator: promote, give the trainer orders"
    ),
    "web": "hear live records without users' data",
    "a link of a region": "what its role may do; the mirror's: read HR_WEIGHTS",
    "admin": "everything",
}
"""Seed to what an attacker who holds it can do, beyond writing any content into the role's own row."""

_LIMITS = """\
## How the broker holds to it

Streams, buckets and roles have an account each (headrace/bus/broker/accounts.py). A role's account imports exactly its
row of the tables above, so the row holds for what the broker publishes in a role's name too:

- The answer to a request returns to the account of the caller, whatever subject the caller named for it. No answer
  reaches a stream, a bucket, a request or a call of anybody else.
- A service answers on the reply subjects alone that the broker writes into a call (`_R_`). A subject lasts for one
  answer; where rollout answers the gateway in parts, until an empty message, or 900 s after the last one.
- Subjects of deliveries and acknowledgements reach nothing but the stream of the consumer, because no other stream is
  in its account.
- Rollup, counters, batches and schedules are off in every stream, and an expiry of single messages in every stream but
  HR_BLOB, so no header reaches another record. Trace events go to the sender's account.
- A bucket has one writer, or keys that begin with their writer's name. A chunk of a payload cannot be replaced.

tests/bus/broker/test_attacks.py tries this with every role's seed against a real broker.

## What the broker cannot keep a seed from

The broker checks subjects. It does not see the body of a request, and it cannot tell tokens apart that share a
wildcard. Inside one run (and the runs branched from it) therefore:

{still}

- A role that may create consumers on a stream may read the whole stream. Reading by sequence or by last subject covers
  a whole stream or bucket, so users' prompts are in a bucket of their own. A payload in HR_BLOB is found by its hash;
  operators, dashboards, and who purges may list the stream.
- A sandbox belongs to a role, not to one actor: an actor of a role can take over what another of the same role
  acquired (an attempt is handed on so). The judge's sandboxes are thus open to judges and to their node alone. Leases
  that nobody renews lapse.
- Subjects do not fence content. Readers compare run, lane, group and type of a message with its subject and treat a
  contradiction like damaged bytes (headrace/bus/nats/addressing.py).

None of this crosses runs that have accounts of their own ([credentials](credentials.md)): another run's streams,
buckets, consumers and inboxes do not exist there. A branch of user feedback runs in the accounts of the run that it
branches from. Regions (deploy/regions) link the accounts of roles, so runs that share regions share them.
"""


def permissions_table() -> str:
    """The page as Markdown."""
    lines = ["# Permissions", "", "Generated by `make docs`; do not edit.", ""]
    lines += ["Everything that no row allows is denied. The admin declares streams and may do everything.", ""]
    lines += ["## Publish", "", "| subject | roles |", "|---|---|"]
    for subject in s.SUBJECTS.values():
        if subject in (s.EVENT, s.ADVISORY, s.RPC, s.RPC_NODE):
            continue
        lines.append(f"| `{_shown(subject.template)}` | {_publishers(subject)} |")
    for kind in s.EVENT.types:
        roles = EVENT_TYPES.get(kind)
        who = ", ".join(roles) if roles else "every role"
        lines.append(f"| `hr.event.<run>.<own role>.{kind}` | {who} |")
    lines += ["", "## Call", "", "A role calls `hr.rpc.<service>.<own role>...`, and a service answers:", ""]
    lines += ["| service | method | callers |", "|---|---|---|"]
    for service, methods in CALLERS.items():
        lines += [f"| {service} | {method} | {', '.join(roles)} |" for method, roles in methods.items()]
    lines.append(f"| every role | {PING} | {', '.join(PINGING)} |")
    lines += [
        "",
        "## Read",
        "",
        "| stream | roles that create consumers | roles that read single records |",
        "|---|---|---|",
    ]
    for stream in s.STREAMS:
        reading = {role: permissions.readable(role).get(stream.name) for role in ROLES}
        consuming = [role for role in ROLES if reading[role]]
        single = [role for role in ROLES if reading[role] is False]
        lines.append(f"| {stream.name} | {', '.join(consuming) or '-'} | {', '.join(single) or '-'} |")
    lines += ["", "## Buckets", "", "| bucket | readers | writer |", "|---|---|---|"]
    for bucket in s.KEY_VALUES:
        writers = KV_WRITERS.get(bucket, "every role, under its own name")
        lines.append(f"| {bucket} | {', '.join(KV_READERS[bucket])} | {writers} |")
    lines += ["", "## API calls", "", "| call | roles |", "|---|---|"]
    for stream in s.STREAMS:
        purging = [role for role, streams in PURGES.items() if stream.name in streams]
        if purging:
            lines.append(f"| purge {stream.name} | {', '.join(purging)} |")
    lines.append("| purge KV_HR_SESSION | feedback |")
    lines.append("| delete a message of HR_TASK | dead_letter, feedback |")
    lines += ["| delete a message of HR_EVENT, HR_DLQ | feedback |", "| create, update, delete a stream | - |"]
    still = [f"| {seed} | {text} |" for seed, text in STILL.items()]
    limits = _LIMITS.replace("{still}", "\n".join(["| seed | can also |", "|---|---|", *still]))
    return "\n".join([*lines, "", limits, _seeds()])


def _publishers(subject: s.Subject) -> str:
    narrow = {
        role: filters[subject.template] for role, filters in permissions.NARROWER.items() if subject.template in filters
    }
    if "every actor" in subject.publishers:
        if subject == s.BLOB:
            return ", ".join(role for role in ACTORS if role not in permissions.NO_BLOBS) + ", operator"
        return "every role, as itself"
    shown = []
    for role in subject.publishers:
        filters = " ".join(f"`{filter}`" for filter in narrow.get(role, ()))
        shown.append(f"{role} ({filters})" if filters else role)
    return ", ".join(shown)


def _shown(template: str) -> str:
    return re.sub(r"\{(\w+)\}", r"<\1>", template)


CONSEQUENCES: dict[str, str] = {
    "curriculum": "choose the tasks, close groups with scores of its choice among those that judges gave, drop groups, "
    "raise the staleness bound, hold back training",
    "rollout": "write attempts that its engine never sampled (the judge decides about their diff), fail attempts, read "
    "users' prompts that it is given",
    "environment": "answer calls of sandboxes on its node wrongly: failed work passes, passed work fails",
    "judge": "give any reward: what is trained is what it says",
    "trainer": "write any step and its outcome, name any file as the next snapshot, purge old records",
    "weight_sync": "withhold versions; none of its own is served without the publisher's key, which lies on the "
    "sender's node alone",
    "gateway": "read its users' prompts and sessions, act in their names, rate in their names, hash their names",
    "feedback": "promote a version, score and close users' groups, answer gates, purge users",
    "scavenger": "lend or take back engines",
    "evaluator": "say that a version passed its evaluation",
    "certifier": "certify tasks that are not fit for training",
    "dead_letter": "give up attempts: their slots count as failed and are issued again",
    "search": "answer searches wrongly",
    "dashboard": "read what is not users' data",
    "operator": "promote a version, give the trainer orders, ask for evaluations and bounds, send messages again, make "
    "API keys, hash users' names, purge users and sign certificates of purges, read everything",
    "replay": "read what is not users' data",
}

_TEXT = """\
## What an attacker with a seed can do

Every stored record has the signature of a role that writes there, and every reader checks it, the audit too
(headrace/bus/signatures.py). A record without one is passed over and reported, by whatever way it came into its stream.
A record of one run, subject or key is not valid on another, nor a second time on its own. So a seed gives its role's
row of this table and nothing else, even where the broker's permissions had a gap:

"""
_NOTES = """\

Records without a role's signature: {places}. Events of the types {types} have none, because nobody acts on them.

A signature does not say that a record is true. A role can write false records of its own kinds, and one of its own
records a second time: the sequence that each write names and the ledger's rules (one closing for a group, the first
score of an attempt, one outcome for a step) decide then, and the audit names contradictions. A signature does not keep
a record in its stream: the roles that purge can remove it. Forged records still fill a stream and cost its readers
time. Runs of one folder of credentials share seeds: give runs that must not trust each other accounts of their own.
The seed of the admin signs no record that a reader accepts.
"""


def _seeds() -> str:
    """The section as Markdown."""
    lines = ["| seed of | records that others accept | with it an attacker can |", "|---|---|---|"]
    for role in (*ACTORS, *READERS):
        filters = [filter for rows in signatures.ROWS.values() for filter, writer in rows if writer == role]
        where = " ".join(f"`{filter}`" for filter in dict.fromkeys(filters)) or "none"
        lines.append(f"| {role} | {where} | {CONSEQUENCES[role]} |")
    places = "; ".join(f"`{re.sub(r'[.]$', '.>', place)}` ({why})" for place, why in signatures.UNSIGNED_PLACES.items())
    types = ", ".join(signatures.UNSIGNED)
    return _TEXT + "\n".join(lines) + "\n" + _NOTES.format(places=places, types=types)


def subjects_table() -> str:
    """The subject and stream tables as Markdown; docs/subjects.md is exactly this."""
    lines = ["# Subjects and streams", "", "Generated by `make docs`; do not edit.", ""]
    lines += ["| subject | types | publishers | readers |", "|---|---|---|---|"]
    for subject in s.SUBJECTS.values():
        types = ", ".join(subject.types) or subject.note
        publishers, readers = ", ".join(subject.publishers), ", ".join(subject.readers)
        lines.append(f"| `{_shown(subject.template)}` | {types} | {publishers} | {readers} |")
    lines += ["", "| stream | subjects | retention | discard | kept |", "|---|---|---|---|---|"]
    for stream in s.STREAMS:
        subjects = ", ".join(f"`{each}`" for each in stream.subjects)
        lines.append(f"| {stream.name} | {subjects} | {stream.retention} | {stream.discard} | {stream.note} |")
    lines += ["", "| key-value bucket | holds |", "|---|---|"]
    lines += [f"| {name} | {note} |" for name, note in s.KEY_VALUES.items()]
    return "\n".join(lines) + "\n"


PAGES = {DOCS / "subjects.md": subjects_table, DOCS / "permissions.md": permissions_table}


if __name__ == "__main__":
    for page, table in PAGES.items():
        page.write_text(table(), encoding="utf-8")
