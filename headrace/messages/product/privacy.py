"""Purges of users' data: the request, the deny-list and the certificate."""

import msgspec

from headrace.messages.base import Amount, Count, Message, Version, message


def denied_key(run: str, user: str) -> str:
    """Key of a user's DeniedUser in HR_PRODUCT; the feedback actor writes it. user: a hash, or ``*`` for all."""
    return f"feedback.{run}.denied.{user}"


def certificate_key(run: str, user: str) -> str:
    """Key of the newest PurgeCertificate of a user in HR_PRODUCT."""
    return f"feedback.{run}.certificate.{user}"


@message("purge_user")
class PurgeUser(Message, frozen=True, kw_only=True):
    """Purge a user's data from every stream and bucket, and keep the user out of later batches. Answered with a
    PurgeCertificate, or with an Ack that says why not."""

    user: str


@message("user_dropped")
class UserDropped(Message, frozen=True, kw_only=True):
    """An actor has dropped what its memory held of a user whose purge it heard of. Core NATS, at most once."""

    user: str
    actor: str
    """``<role>.<id>``, as its heartbeats are named."""


@message("readmit_user")
class ReadmitUser(Message, frozen=True, kw_only=True):
    """Take a user off the deny-list. Answered with an Ack: of a user who is not on it, or whose purge is not over, with
    the reason."""

    user: str


@message("denied_user")
class DeniedUser(Message, frozen=True, kw_only=True):
    """A user whose data was purged, a value in HR_PRODUCT: no later session of the user is trained on until the user is
    readmitted. Every purge writes it anew, and gateways then drop what they hold of the user."""

    run: str
    user: str
    since: Amount
    """Seconds since the epoch."""
    readmitted: Amount = 0.0
    """Seconds since the epoch at which the user was taken off the list; 0.0 while the user is on it."""


class PurgedRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The deleted records of one stream."""

    stream: str
    filter: str
    """The subjects that were deleted; of records that are found by their content, the subjects that were searched."""
    by_content: bool = False
    """Found by the user's hash in the content: other records on these subjects stay."""
    count: Count = 0
    sequences: tuple[tuple[Count, Count], ...] = ()
    """First and last of every range; empty for chunks of blobs and for values of buckets."""
    sha256: str = ""
    """Over the SHA-256 of every record's payload, in order; of chunks and values over their subjects."""


class PurgeStatement(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a certificate."""

    run: str
    user: str
    branch: str
    asked: Amount
    """Seconds since the epoch."""
    ended: Amount
    """Seconds since the epoch at which a pass over all streams found nothing more."""
    records: tuple[PurgedRecords, ...]
    ended_requests: tuple[str, ...]
    """Sessions whose requests were under way and were cancelled."""
    ratings: Count
    last_version_before: Version
    """The newest branch version that no purged rating had a part in; -1 when none had a part in any version."""
    absorbed_steps: tuple[Count, ...]
    """Steps of the branch that trained on purged ratings. Every version after the first of them keeps what it
    learned."""
    pending_groups: tuple[str, ...]
    """Groups of the user in batches that were closed and had no outcome yet when the purge ended."""
    denied: bool
    kept: tuple[str, ...]
    """Descriptions of the data that stays."""
    elsewhere: tuple[str, ...] = ()
    """Objects, folders and machines, and why they hold nothing of the user."""
    reached: tuple[str, ...] = ()
    """The actors that said that they dropped the user from their memory, as ``<role>.<id> on <node>``."""
    unreached: tuple[str, ...] = ()
    """The actors that lived and did not say so in time: what they hold of the user ends with them, or when they hear
    of the purge."""


@message("purge_certificate")
class PurgeCertificate(Message, frozen=True, kw_only=True):
    """A signed PurgeStatement; also a value in HR_PRODUCT."""

    statement: str
    """PurgeStatement as JSON. The signature covers these bytes as they are."""
    signature: str
    """Ed25519, hexadecimal."""
    public_key: str
    """Hexadecimal. A reader compares it with the one that the operator published (`purge.pub` of the run's folder)."""
    detail: str = ""
    """One sentence for the person who asked."""
