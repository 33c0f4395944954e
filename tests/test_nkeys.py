"""The text form of keys: what the broker, the roles and the signatures of weights share."""

import pytest
from nacl.signing import SigningKey

from headrace import nkeys
from headrace.bus.broker.keys import Key


def test_texts_and_bytes_convert_both_ways() -> None:
    key = Key.make()
    assert Key.parse(f"{key.seed}\n").public == key.public
    assert nkeys.public_text(nkeys.public_bytes(key.public)) == key.public
    assert nkeys.public_bytes(key.public) == bytes(SigningKey(nkeys.seed_bytes(key.seed)).verify_key)
    assert key.public.startswith("U") and key.seed.startswith("SU")


def test_other_texts_are_refused() -> None:
    key = Key.make()
    changed = key.public[:-1] + ("A" if key.public[-1] != "A" else "B")
    for text in ("", "U", changed, key.public.lower(), key.seed, "U" * 56, "\0"):
        with pytest.raises(ValueError):
            nkeys.public_bytes(text)
    for text in ("", key.public, key.seed[:-1], key.seed + "A"):
        with pytest.raises(ValueError):
            nkeys.seed_bytes(text)
