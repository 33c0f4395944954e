"""Who published a version: Ed25519 signatures on manifests, heads and folds.

The idea: whoever may write the stream could publish weights, and a region's mirror is somebody else's disk. So the
sender signs what commits a version, with a key that lies on its node alone, and a receiver refuses what it cannot
verify. A manifest names its chunks by sha256 and its state by hash, so one signature covers every byte. A head names
the sequence of the head before it: replayed at another place it does not fit.

What is signed: message type, run, version, state root, and the sha256 of the canonical bytes: the message as msgpack
without its signature, and without fields that came after the first edition while they hold their defaults. So a field
that is added later changes no old signature, and an old reader that does not know a field refuses what it holds.

Keys are NKEYs (github.com/nats-io/nkeys): base32 of a prefix byte, 32 bytes of key, CRC-16/XMODEM. Ed25519: RFC 8032.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from headrace.messages.weights import WeightFold, WeightHead, WeightManifest
from headrace.weights.state import WeightError

PUBLIC_FILE = "weight_publisher.pub"
"""Lies in the credentials folder of every node: the publisher's public key, one a line."""
_LATER = frozenset({"precision", "source_hash", "after", "signer"})
_USER = 20 << 3

Signed = WeightManifest | WeightHead | WeightFold
S = TypeVar("S", WeightManifest, WeightHead, WeightFold)


class Untrusted(WeightError):
    """A manifest, head or fold that nobody signed whom this node knows."""


class Signer(Protocol):
    """A private key; `bus.keys.Key` is one."""

    @property
    def public(self) -> str:
        """The public key as an NKEY."""

    def sign_bytes(self, data: bytes) -> bytes:
        """The 64 bytes of an Ed25519 signature."""


def canonical(message: Signed) -> bytes:
    """The bytes that stand for a message: the same for every edition of the reader."""
    fields = {}
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if field.name != "signature" and not (field.name in _LATER and value == field.default):
            fields[field.name] = value
    return msgspec.msgpack.encode(fields)


def digest(manifest: WeightManifest) -> str:
    """sha256 of a manifest, 64 hex digits: what the next manifest names as its parent."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def statement(message: Signed) -> bytes:
    """What a signature is taken of."""
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
    """A user's public NKEY. WeightError when it is none."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (ValueError, binascii.Error):
        raw = b""
    if len(raw) != 35 or raw[0] != _USER or binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise WeightError(f"{text!r} is no public key (an NKEY of a user begins with U and has 56 characters)")
    return VerifyKey(raw[1:-2])


class Trust:
    """Whose versions a node takes."""

    def __init__(self, keys: Iterable[str], *, unsigned: bool = False):
        """keys: public NKEYs. unsigned: take also what nobody signed; a signature that is there has to be right.

        WeightError for a key that is none.
        """
        self._keys = {text: public_key(text) for text in keys}
        self._unsigned = unsigned

    @classmethod
    def load(cls, credentials: str | Path | None, keys: Iterable[str] = (), *, unsigned: bool = False) -> "Trust":
        """The configured keys, or where there are none those of `PUBLIC_FILE` in the credentials folder."""
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
        """Untrusted, with what to do about it, unless a known key signed exactly this."""
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
            raise Untrusted(f"{what} is signed by {message.signer or 'nobody'}, who is not among [weights] publishers")
        try:
            key.verify(statement(message), message.signature)
        except (BadSignatureError, ValueError):
            raise Untrusted(f"{what} does not bear out the signature of {message.signer}: it was changed") from None


def check(trust: Trust | None, message: Signed) -> None:
    """`trust.check`, or nothing where the caller asked for no check."""
    if trust is not None:
        trust.check(message)
