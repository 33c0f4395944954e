"""Signatures of stored records: Ed25519 by the seed of the role that writes, checked by everyone that reads.

The idea: the broker's permissions decide who may publish where, and one gap in them would let a role write another
role's records. So every record that is stored carries its writer's signature, `UNSIGNED` and `UNSIGNED_PLACES` aside.
A reader accepts the keys of the roles that the table of subjects names as writers there, and treats another record like
damaged bytes: readers skip and report it, a durable consumer makes it a dead letter, and neither the ledger nor a
resend counts it. The public keys of all roles are in `FILE`, beside the seeds.

A signature covers the subject (and with it the run, or the bucket's key), type, version and encoding, a deletion, the
message id, the moment, and the BLAKE3 of the stored bytes, which takes a third of the time of SHA-256. A claim check is
signed itself: it names its payload by hash. So a record is valid on one subject alone, and in time: a reader refuses
one that was stored more than `FRESH_S` before or after it was signed. The broker refuses a message id again for twice
as long (`messages.subjects`), so a signed record that is stored a second time is never accepted.

Cost: 20 us to sign and 55 us to verify (libsodium), and 170 us for the digest of 1 MB; a signature that was verified is
not computed again in the process. RFC 8032.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from headrace import nkeys
from headrace.bus.broker import permissions
from headrace.messages import subjects as s
from headrace.messages.codec import ENCODING_HEADER, TYPE_HEADER, UnreadableMessage, decode
from headrace.messages.operations import BlobRef

HEADER = "Hr-Signature"
"""Public key, milliseconds since 1970, signature (base64) and `DIGEST`, with a space between."""
DIGEST = "blake3"
"""Digest of the stored bytes."""
ID_HEADER = "Hr-Id"
"""The writer's own name for a message; ``Nats-Msg-Id`` is a MAC of it."""
FILE = "writers.pub"
"""A file in the credentials folder: a role and one of its public keys per line. A role may have several."""
FRESH_S = 300.0
"""A record is valid if it was stored within this time of its signature, by the broker's clock."""
FORGED = "forged: "
"""How the reason begins for which a record without a valid signature is refused."""
REMEMBERED = 1 << 16
"""Verified signatures that a process remembers."""

UNSIGNED = ("event", "tool_log", "token_gaps")
"""Types on HR_EVENT without a signature: they are for people alone."""
UNSIGNED_PLACES: dict[str, str] = {
    "hr.weights.": "the publisher of weights signs manifests and heads; a manifest names its chunks",
    "hr.blob.": "a reference names its payload by hash",
    "$KV.HR_PRESENCE.": "heartbeats lapse after seconds",
    "$JS.EVENT.": "the broker itself writes advisories",
}
"""Subjects whose records have no signature of a role, and why."""

_verified: dict[bytes, None] = {}


class Forged(UnreadableMessage):
    """A record without a valid signature of a role that writes there."""


class SigningKey(Protocol):
    """A private key; `bus.broker.keys.Key` is one."""

    @property
    def public(self) -> str:
        """The public key as an NKEY."""

    def sign_bytes(self, data: bytes) -> bytes:
        """The 64 bytes of an Ed25519 signature."""


def _rows() -> dict[str, list[tuple[str, str]]]:
    """First two tokens of a subject to (filter, role that writes there)."""
    rows: list[tuple[str, str]] = []
    for subject in s.SUBJECTS.values():
        if s.stream_of(subject.where()) is None or subject == s.EVENT:
            continue
        for role in subject.publishers:
            for filter in permissions.NARROWER.get(role, {}).get(subject.template, (subject.where(),)):
                rows.append((filter, role))
    rows += [(s.EVENT.where(actor=role), role) for role in (*permissions.ACTORS, *permissions.READERS)]
    for bucket in s.KEY_VALUES:
        if bucket in permissions.KV_WRITERS:
            rows.append((f"$KV.{bucket}.>", permissions.KV_WRITERS[bucket]))
        else:
            rows += [(f"$KV.{bucket}.{role}.>", role) for role in permissions.ACTORS]
    table: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        table.setdefault(".".join(row[0].split(".")[:2]), []).append(row)
    return table


ROWS = _rows()


@lru_cache(maxsize=4096)
def writers(subject: str, kind: str) -> frozenset[str] | None:
    """The roles that may sign a record of this type on this subject; None where records are not signed.

    subject: of a stream or bucket. kind: the type's name, empty for a deleted key.
    """
    if subject.startswith(tuple(UNSIGNED_PLACES)) or (kind in UNSIGNED and subject.startswith("hr.event.")):
        return None
    tokens = [*subject.split(".", 2)[:2], ""]
    rows = ROWS.get(".".join(tokens[:2]), ())
    roles = {role for filter, role in rows if s.covers(filter, subject)}
    return frozenset(roles.intersection(permissions.EVENT_TYPES.get(kind, roles)) if tokens[1] == "event" else roles)


def kind_of(headers: Mapping[str, str], payload: bytes | memoryview) -> str:
    """The type of a record, and of the message behind a claim check. UnreadableMessage for a damaged claim check."""
    kind = headers.get(TYPE_HEADER, "").partition("/")[0]
    if kind != BlobRef.type_name:
        return kind
    ref = decode(payload, headers)
    assert isinstance(ref, BlobRef)
    return ref.type.partition("/")[0]


def statement(subject: str, headers: Mapping[str, str], payload: bytes | memoryview, moment_ms: int) -> bytes:
    """The bytes that are signed."""
    lines = ("headrace record 2", subject, headers.get(TYPE_HEADER, ""), headers.get(ENCODING_HEADER, ""),
             headers.get("KV-Operation", ""), headers.get("Nats-Msg-Id", ""), headers.get(ID_HEADER, ""),
             str(moment_ms), blake3(payload).hexdigest())  # fmt: skip
    return "\n".join(lines).encode()


def signed(key: SigningKey, subject: str, headers: Mapping[str, str], payload: bytes) -> dict[str, str]:
    """The headers with a signature of this moment."""
    moment_ms = int(time.time() * 1000)
    signature = base64.b64encode(key.sign_bytes(statement(subject, headers, payload, moment_ms))).decode()
    return {**headers, HEADER: f"{key.public} {moment_ms} {signature} {DIGEST}"}


def message_id(seed: str, subject: str, name: str) -> str:
    """The id under which the broker drops repetitions: ids are shared by all writers of a stream, and this one can be
    made by the holder of the seed alone. seed: empty without credentials; the id is then the name."""
    if not seed:
        return name
    return hmac.digest(_id_secret(seed), f"{subject}\n{name}".encode(), "sha256").hex()[:32]


@lru_cache(maxsize=64)
def _id_secret(seed: str) -> bytes:
    return hmac.digest(seed.encode(), b"headrace message ids", "sha256")


class Trust:
    """The public keys of a run's roles, as `FILE` names them."""

    def __init__(self, file: Path | None) -> None:
        """file: read when the first unknown key is met, and again whenever it has changed. None: no key is known."""
        self._file = file
        self._read_at: tuple[int, int] = (0, 0)
        self._keys: dict[str, tuple[VerifyKey, set[str]]] = {}

    @classmethod
    def of(cls, credentials: str | Path | None) -> "Trust":
        """Those beside the seeds of a folder, or beside one seed file."""
        path = Path(credentials) if credentials else None
        return cls(None if path is None else (path if path.is_dir() else path.parent) / FILE)

    def _key(self, public: str) -> tuple[VerifyKey, set[str]] | None:
        if public not in self._keys and self._file is not None:
            try:
                about = self._file.stat()
                if (about.st_mtime_ns, about.st_ino) != self._read_at:
                    self._keys = parse(self._file.read_text(encoding="ascii"))
                    self._read_at = about.st_mtime_ns, about.st_ino
            except (OSError, ValueError) as error:
                raise Forged(f"{FORGED}the public keys of its writers cannot be read: {error}") from None
        return self._keys.get(public)

    def of_role(self, role: str) -> dict[str, VerifyKey]:
        """The public keys of a role, by their text. Forged where they cannot be read."""
        self._key("")  # reads the file
        return {public: key for public, (key, roles) in self._keys.items() if role in roles}

    def check(
        self, subject: str, kind: str, headers: Mapping[str, str], payload: bytes | memoryview, stored: float
    ) -> None:
        """Verify the signature of a record. Forged says what is wrong. stored: when the broker stored it, in seconds
        since the epoch."""
        roles = writers(subject, kind)
        if roles is None:
            return
        what = f"{FORGED}a {kind[:40] or 'deletion'} of {' or '.join(sorted(roles)) or 'nobody'}"
        public, _, rest = headers.get(HEADER, "").partition(" ")
        if not public:
            raise Forged(f"{what} without a signature")
        known = self._key(public)
        if known is None:
            raise Forged(f"{what}, signed by {public[:56]}, which {FILE} of the credentials here does not name")
        if not known[1] & roles:
            raise Forged(f"{what}, signed by {' or '.join(sorted(known[1]))}")
        moment, _, text = rest.partition(" ")
        text, _, digest = text.partition(" ")
        try:
            moment_ms, signature = int(moment), base64.b64decode(text, validate=True)
            if digest != DIGEST:
                raise ValueError(f"unknown digest {digest!r}")
            data = statement(subject, headers, payload, moment_ms)
            done = hashlib.sha256(b"%s %s" % (signature, data)).digest()
            if done not in _verified:
                known[0].verify(data, signature)
                _verified[done] = None
                if len(_verified) > REMEMBERED:
                    del _verified[next(iter(_verified))]
        except (ValueError, binascii.Error, BadSignatureError):
            raise Forged(f"{what} that was changed, or signed for another subject") from None
        if abs(stored - moment_ms / 1000) > FRESH_S:
            raise Forged(
                f"{what}, stored {stored - moment_ms / 1000:.0f} s after it was signed: an old record that was stored "
                f"again, or the clocks of its writer and the broker differ"
            )


def parse(text: str) -> dict[str, tuple[VerifyKey, set[str]]]:
    """Public key to its verifier and roles, from the lines of `FILE`. ValueError."""
    keys: dict[str, tuple[VerifyKey, set[str]]] = {}
    for line in text.splitlines():
        role, _, public = line.partition(" ")
        if not line.strip():
            continue
        if role not in permissions.ROLES:
            raise ValueError(f"{FILE} names the role {role[:40]!r}: expected lines of a role and its public key")
        keys.setdefault(public, (VerifyKey(nkeys.public_bytes(public)), set()))[1].add(role)
    return keys
