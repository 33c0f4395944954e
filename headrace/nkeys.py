"""The text form of Ed25519 keys in NATS: prefix byte(s), 32 bytes of key, CRC-16/XMODEM, in base32 without padding.

The encoding is that of github.com/nats-io/nkeys. PyPI's `nkeys` 0.2.1 is not used: it comes as sources alone, makes no
new keys and does not parse public ones.
"""

import base64
import binascii

_SEED, _USER = 18 << 3, 20 << 3


def _encode(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def _decode(text: str, length: int) -> bytes:
    raw = base64.b32decode(text + "=" * (-len(text) % 8))[:-2]
    if len(raw) != length or _encode(raw) != text:
        raise ValueError("not an NKEY")
    return raw


def public_text(key: bytes) -> str:
    """A user's public key as text: ``U`` and 55 more characters."""
    return _encode(bytes([_USER]) + key)


def public_bytes(text: str) -> bytes:
    """The 32 bytes of a user's public key. ValueError when the text is not one."""
    raw = _decode(text, 33)
    if raw[0] != _USER:
        raise ValueError("not the public key of a user")
    return raw[1:]


def seed_text(seed: bytes) -> str:
    """A user's seed as text: ``SU`` and 56 more characters."""
    return _encode(bytes([_SEED | (_USER >> 5), (_USER & 31) << 3]) + seed)


def seed_bytes(text: str) -> bytes:
    """The 32 bytes of a user's seed. ValueError when the text is not one."""
    seed = _decode(text, 34)[2:]
    if seed_text(seed) != text:
        raise ValueError("not the seed of a user key")
    return seed
