"""Signatures: what was published is taken, what was changed, forged or moved is refused with a reason."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus.broker import credentials
from headrace.bus.broker.keys import Key
from headrace.messages.weights import TensorInfo, WeightHead, WeightManifest
from headrace.weights import heads, signing
from headrace.weights.signing import Trust, Untrusted, sealed
from headrace.weights.state import WeightError
from tests.support.keys import PUBLISHER, STRANGER, trust

HEAD = WeightHead(run="r1", version=3, manifest_seq=9, state_hash="a" * 32, full_version=0, full_seq=2, after=5)
MANIFEST = WeightManifest(
    run="r1", version=3, base_version=2, base_seq=7, step=3, tensors=(TensorInfo("w", "BF16", (2, 3)),), chunks=(),
    block_hashes=b"h" * 16, state_hash="a" * 32, base_hash="b" * 32, parent="c" * 64, raw_bytes=12, wire_bytes=0,
    changed=0, elements=6,
)  # fmt: skip


@pytest.mark.parametrize("message", [HEAD, MANIFEST], ids=lambda message: message.type_name)
def test_what_the_publisher_signed_is_taken_and_any_change_to_it_is_not(message: Any) -> None:
    signed = sealed(message, PUBLISHER)
    trust().check(signed)
    assert len(signed.signature) == 64 and signed.signer == PUBLISHER.public
    for field in msgspec.structs.fields(signed):
        if field.name not in ("signature", "signer"):
            changed = {field.name: other(getattr(signed, field.name))}
            with pytest.raises(Untrusted, match="it was changed"):
                trust().check(msgspec.structs.replace(signed, **changed))


def other(value: Any) -> Any:
    """A value of the same type that is not the same."""
    if isinstance(value, int | float):
        return value + 1
    more: dict[Any, Any] = {str: "x", bytes: b"x", tuple: (TensorInfo("x", "F32", (1,)),)}
    return value + more[type(value)]


def test_strangers_and_borrowed_names_are_refused() -> None:
    with pytest.raises(Untrusted, match=f"signed by {STRANGER.public}"):
        trust().check(sealed(HEAD, STRANGER))
    borrowed = msgspec.structs.replace(sealed(HEAD, STRANGER), signer=PUBLISHER.public)
    with pytest.raises(Untrusted, match="was changed"):
        trust().check(borrowed)
    moved = msgspec.structs.replace(HEAD, signer=PUBLISHER.public, signature=sealed(MANIFEST, PUBLISHER).signature)
    with pytest.raises(Untrusted, match="was changed"):
        trust().check(moved)
    with pytest.raises(Untrusted, match="was changed"):
        trust().check(msgspec.structs.replace(sealed(HEAD, PUBLISHER), signature=b"short"))


def test_unsigned_versions_need_a_word_in_the_configuration() -> None:
    with pytest.raises(Untrusted, match=r"head of version 3 of run r1 is not signed; set \[weights\] unsigned = true"):
        trust().check(HEAD)
    trust(unsigned=True).check(HEAD)
    with pytest.raises(Untrusted, match="was changed"):
        trust(unsigned=True).check(msgspec.structs.replace(sealed(HEAD, PUBLISHER), version=4))
    with pytest.raises(Untrusted, match=r"no publisher's key is known here: put weight_publisher.pub"):
        Trust([]).check(sealed(HEAD, PUBLISHER))


def test_keys_come_with_the_credentials_folder(tmp_path: Path) -> None:
    folder = credentials.write(tmp_path / "credentials")
    key = Key.parse((folder / "weight_publisher.nk").read_text())
    assert (folder / "weight_publisher.nk").stat().st_mode & 0o777 == 0o600
    for given in (folder, folder / "rollout.nk"):
        Trust.load(given).check(sealed(HEAD, key))
    credentials.write(folder)
    assert Key.parse((folder / "weight_publisher.nk").read_text()).public == key.public, "it stays"
    node = credentials.write(tmp_path / "node")
    with pytest.raises(Untrusted):
        Trust.load(node).check(sealed(HEAD, key))
    credentials.adopt_publisher(node, folder)
    assert not (node / "weight_publisher.nk").exists(), "a node that receives cannot sign"
    credentials.write(node)
    Trust.load(node).check(sealed(HEAD, key))
    Trust.load(None, [key.public]).check(sealed(HEAD, key))


def test_no_key_of_a_sibling_signs_a_version(tmp_path: Path) -> None:
    """Every role of a run has a key, and so has every role of another run; only the publisher's signs what is taken."""
    folder, other = credentials.write(tmp_path / "credentials"), credentials.write(tmp_path / "other")
    publisher, trusted = Key.parse((folder / "weight_publisher.nk").read_text()), Trust.load(folder)
    siblings = {*folder.glob("*.nk"), *other.glob("*.nk")} - {folder / "weight_publisher.nk"}
    messages: tuple[Any, ...] = (HEAD, MANIFEST)
    assert len(siblings) > 25 and other / "weight_publisher.nk" in siblings and folder / "weight_sync.nk" in siblings
    for path in siblings:
        for message in messages:
            forged = sealed(message, Key.parse(path.read_text()))
            with pytest.raises(Untrusted, match="signed by"):
                trusted.check(forged)
            with pytest.raises(Untrusted, match="was changed"):
                trusted.check(msgspec.structs.replace(forged, signer=publisher.public))


@pytest.mark.parametrize(
    "text", ["", "U", "x" * 56, PUBLISHER.public[:-1], PUBLISHER.public[:-1] + "7", PUBLISHER.seed]
)
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(WeightError, match="is not a public key"):
        Trust([text])


def test_fields_of_later_editions_change_no_older_digest_or_signature() -> None:
    """The first edition of the manifest, as msgpack: its sha256 was the parent that its successor names."""
    fields = {field.encode_name: getattr(MANIFEST, field.name) for field in msgspec.structs.fields(MANIFEST)}
    for later in ("precision", "source_hash", "detached", "signer", "signature"):
        del fields[later]
    first = msgspec.msgpack.encode(fields)
    assert signing.digest(MANIFEST) == hashlib.sha256(first).hexdigest()
    assert signing.digest(sealed(MANIFEST, PUBLISHER)) != signing.digest(MANIFEST), "who signed is part of it"
    assert signing.digest(msgspec.structs.replace(sealed(MANIFEST, PUBLISHER), signature=b"")) == signing.digest(
        sealed(MANIFEST, PUBLISHER)
    )


class Lying:
    """A message at a sequence."""

    def __init__(self, seq: int, message: Any):
        self.seq, self.message = seq, message


def test_a_true_head_at_another_place_does_not_count() -> None:
    book = heads.Heads("r1", trust())
    first, second = (
        sealed(msgspec.structs.replace(HEAD, version=version, after=after), PUBLISHER)
        for version, after in ((3, 0), (4, 10))
    )
    assert book.take(Lying(10, first)) == first
    assert book.take(Lying(20, second)) == second
    for again in (first, second):
        with pytest.raises(Untrusted, match="an old head was stored again"):
            book.take(Lying(30, again))
    with pytest.raises(Untrusted, match="not signed"):
        book.take(Lying(31, msgspec.structs.replace(HEAD, version=9)))
    with pytest.raises(Untrusted, match="no head record of run r1"):
        book.take(Lying(32, sealed(msgspec.structs.replace(HEAD, run="r2"), PUBLISHER)))
    assert (book.newest, book.seq, book.last_seq) == (second, 20, 32)
    third = sealed(msgspec.structs.replace(HEAD, version=5, after=32), PUBLISHER)
    assert book.take(Lying(40, third)) == third, "the next true one is written on top of all that"
