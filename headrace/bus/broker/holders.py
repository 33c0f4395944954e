"""A section of docs/permissions.md: the power of each role's seed in the hands of an attacker.

The lists of subjects are made from the tables that readers check signatures with; the sentences say what follows.
"""

import re

from headrace.bus import signatures
from headrace.bus.broker.permissions import ACTORS, READERS

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
    "operator": "promote a version, ask for evaluations and bounds, send messages again, make API keys, hash users' "
    "names, sign certificates of purges, read everything",
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

A signature does not say that a record is true. A role can write false records of its own kinds, and it can write one of
its own records a second time with a new signature: the sequence that each write names, and the ledger's rules (one
closing for a group, the first score of an attempt, one outcome for a step), decide then, and the audit names
contradictions. A signature does not keep a record in its stream: the roles that purge can remove it. Forged records
still fill a stream, and each costs its readers 0.1 ms. Runs of one folder of credentials share seeds, and only the
run's name in the subject tells their records apart: give runs that must not trust each other accounts of their own.
The seed of the admin signs no record that a reader accepts, but the admin may change the mark in a stream's
configuration that says from which sequence records are signed.
"""


def table() -> str:
    """The section as Markdown."""
    lines = ["| seed of | records that others accept | with it an attacker can |", "|---|---|---|"]
    for role in (*ACTORS, *READERS):
        filters = [filter for rows in signatures.ROWS.values() for filter, writer in rows if writer == role]
        where = " ".join(f"`{filter}`" for filter in dict.fromkeys(filters)) or "none"
        lines.append(f"| {role} | {where} | {CONSEQUENCES[role]} |")
    places = "; ".join(f"`{re.sub(r'[.]$', '.>', place)}` ({why})" for place, why in signatures.UNSIGNED_PLACES.items())
    types = ", ".join(signatures.UNSIGNED)
    return _TEXT + "\n".join(lines) + "\n" + _NOTES.format(places=places, types=types)
