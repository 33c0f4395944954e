"""Seeds without a generator: each is derived from names and numbers, so there is no state that a crash could lose."""

from hashlib import sha256


def seed_of(*parts: object) -> int:
    """A 62-bit seed from a path such as (run seed, group, slot, attempt)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 2
