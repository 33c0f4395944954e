"""Signatures of published versions: Ed25519 on manifests and heads.

The idea: any role that may write the stream could publish weights, and a region's mirror may belong to another party.
So the sender signs the records that commit a version with a key that is on its node alone, and a receiver refuses a
record that it cannot verify. A manifest names its chunks by sha256 and its state by hash, so one signature covers every
byte. A head names the sequence of the head before it, so a head that is stored again later is not valid.

A signature covers the message type, run, version, state root, and the sha256 of the canonical bytes: the message as
msgpack under its wire names, without its signature, and without fields that were added after the first release while
they hold their defaults. So a field that is added later invalidates no old signature, and an old reader refuses a
message with a field that it does not know.

Keys are NKEYs (headrace/nkeys.py). Ed25519: RFC 8032.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from headrace import nkeys
from headrace.messages.weights import WeightHead, WeightManifest
from headrace.weights.state import WeightError

PUBLIC_FILE = "weight_publisher.pub"
"""A file in the credentials folder of every node: the publishers' public keys, one per line."""
_LATER = frozenset({"precision", "source_hash", "after", "signer", "detached"})

Signed = WeightManifest | WeightHead
S = TypeVar("S", WeightManifest, WeightHead)


class Untrusted(WeightError):
    """A manifest or head without a valid signature of a publisher that this node knows."""


class Signer(Protocol):
    """A private key; `bus.broker.keys.Key` is one."""

    @property
    def public(self) -> str:
        """The public key as an NKEY."""

    def sign_bytes(self, data: bytes) -> bytes:
        """The 64 bytes of an Ed25519 signature."""


def canonical(message: Signed) -> bytes:
    """The bytes of a message that are signed and hashed: the same in every release."""
    fields = {}
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if field.name != "signature" and not (field.name in _LATER and value == field.default):
            fields[field.encode_name] = value
    return msgspec.msgpack.encode(fields)


def digest(manifest: WeightManifest) -> str:
    """sha256 of a manifest, 64 hex digits. The next manifest names it as its parent."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def statement(message: Signed) -> bytes:
    """The bytes that are signed."""
    inside = hashlib.sha256(canonical(message)).hexdigest()
    kind = f"{message.type_name}/{message.type_version}"
    return f"headrace {kind} {message.run} {message.version} {message.state_hash} {inside}".encode()


def sealed(message: S, signer: Signer | None) -> S:
    """The message with its signature; unchanged without a signer."""
    if signer is None:
        return message
    named = msgspec.structs.replace(message, signer=signer.public, signature=b"")
    return msgspec.structs.replace(named, signature=signer.sign_bytes(statement(named)))


def public_key(text: str) -> VerifyKey:
    """The key of a user's public NKEY. WeightError when the text is not one."""
    try:
        return VerifyKey(nkeys.public_bytes(text))
    except ValueError:
        raise WeightError(
            f"{text!r} is not a public key: expected an NKEY of a user, U and 55 more characters"
        ) from None


class Trust:
    """The publishers whose versions a node accepts."""

    def __init__(self, keys: Iterable[str], *, unsigned: bool = False):
        """keys: public NKEYs. unsigned: also accept unsigned records; a signature that is present must be valid.

        WeightError for a malformed key.
        """
        self._keys = {text: public_key(text) for text in keys}
        self._unsigned = unsigned

    @classmethod
    def load(cls, credentials: str | Path | None, keys: Iterable[str] = (), *, unsigned: bool = False) -> "Trust":
        """The configured keys; without any, those of `PUBLIC_FILE` in the credentials folder. WeightError as
        `__init__`."""
        names = tuple(keys)
        if not names and credentials:
            folder = Path(credentials)
            try:
                text = ((folder if folder.is_dir() else folder.parent) / PUBLIC_FILE).read_text(encoding="ascii")
            except OSError:
                text = ""
            names = tuple(text.split())
        return cls(names, unsigned=unsigned)

    def check(self, message: Signed) -> None:
        """Verify the signature of a message. Untrusted, with the setting to change, when no known key signed it."""
        what = f"the {message.type_name.removeprefix('weight_')} of version {message.version} of run {message.run}"
        if not message.signature:
            if self._unsigned:
                return
            raise Untrusted(f"{what} is not signed; set [weights] unsigned = true to take unsigned versions")
        if not self._keys:
            if self._unsigned:
                return
            raise Untrusted(
                f"{what} is signed, but no publisher's key is known here: put {PUBLIC_FILE} into the credentials "
                f"folder, or name the key in [weights] publishers"
            )
        key = self._keys.get(message.signer)
        if key is None:
            signer = message.signer or "no key"
            raise Untrusted(f"{what} is signed by {signer}, which is not among [weights] publishers")
        try:
            key.verify(statement(message), message.signature)
        except (BadSignatureError, ValueError):
            raise Untrusted(f"{what} does not match the signature of {message.signer}: it was changed") from None


def check(trust: Trust | None, message: Signed) -> None:
    """`trust.check`; no check when `trust` is None."""
    if trust is not None:
        trust.check(message)
