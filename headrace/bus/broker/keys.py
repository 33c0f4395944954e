"""NKEYs: the broker knows public keys only; a role authenticates by signing the broker's nonce.

Why: no password is in a configuration or on the wire, and a check costs microseconds, where bcrypt costs a tenth of a
second per connection.
"""

import base64
import os
from pathlib import Path

from nacl.exceptions import CryptoError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey

from headrace import nkeys


class Key:
    """A user's key pair. `public` starts with ``U``, `seed` with ``SU``."""

    def __init__(self, raw: bytes) -> None:
        self._signing = SigningKey(raw)
        self.public = nkeys.public_text(bytes(self._signing.verify_key))
        self.seed = nkeys.seed_text(raw)

    @classmethod
    def make(cls) -> "Key":
        """A new random key."""
        return cls(os.urandom(32))

    @classmethod
    def parse(cls, seed: str) -> "Key":
        """From the text of a seed. ValueError when it is not a user's seed."""
        return cls(nkeys.seed_bytes(seed.strip()))

    def sign(self, nonce: str) -> bytes:
        """The signature that the broker checks, base64 without padding."""
        return base64.urlsafe_b64encode(self._signing.sign(nonce.encode()).signature).rstrip(b"=")

    def sign_bytes(self, data: bytes) -> bytes:
        """The raw Ed25519 signature of any bytes, 64 of them: what weights are signed with."""
        return bytes(self._signing.sign(data).signature)

    def opened(self, box: bytes) -> bytes | None:
        """Open a box that was sealed for this key; None when it is damaged or for another key."""
        try:
            return SealedBox(self._signing.to_curve25519_private_key()).decrypt(box)
        except CryptoError:
            return None


def sealed(secret: bytes, public: VerifyKey) -> bytes:
    """A box that the holder of the seed of a public key can open."""
    return SealedBox(public.to_curve25519_public_key()).encrypt(secret)


def load(credentials: str | Path | None, role: str) -> Key | None:
    """The key of a role: `credentials` is a seed file or a folder with ``<role>.nk`` in it. None when there are none.

    ValueError with one sentence when the file is missing or unreadable.
    """
    if not credentials:
        return None
    path = Path(credentials)
    if path.is_dir():
        path = path / f"{role}.nk"
    try:
        return Key.parse(path.read_text(encoding="ascii"))
    except OSError as error:
        raise ValueError(f"no credentials for role {role!r}: {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} does not hold a user's seed") from None
