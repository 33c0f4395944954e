"""Tokenizer: everything round-trips, tags can't be forged, the file is Hugging Face's."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace

from headrace.harness.rehearse import answer
from headrace.policy import schemas
from headrace.policy.renderer import Format
from headrace.policy.tokenizer import Tokenizer
from headrace.tasks import traces


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(traces.tokenizer_texts(7, 200, Format(), answer))


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return Tokenizer.train(texts, 640)


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in ["", "\0\x01\x7f", "ä€😀 \r\n\t x", "   deep\n\n\n    y = 1\n", "".join(map(chr, range(1, 0x250)))]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= id < len(tokenizer) for id in ids)


def test_text_never_becomes_a_tag(tokenizer: Tokenizer) -> None:
    special = set(tokenizer.tags.values())
    for tag in schemas.tags():
        ids = tokenizer.encode(f"a{tag}b")
        assert not special & set(ids)
        assert tokenizer.decode(ids) == f"a{tag}b"
        assert tokenizer.decode([tokenizer.tags[tag]]) == tag


def test_size_and_determinism(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert len(tokenizer) == 640
    assert Tokenizer.train(texts, 640).dump() == tokenizer.dump()
    with pytest.raises(ValueError, match="no room"):
        Tokenizer.train(texts, 256)


def test_digits_stand_alone_and_paths_stay_whole(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([id]) for id in tokenizer.encode("1234 56")] == ["1", "2", "3", "4", " 5", "6"]
    assert len(tokenizer.encode("kit/core.py")) == 1


def test_the_file_is_read_by_hugging_face(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    text = "def vokdax(xs):\n    return xs[0]"
    again = Tokenizer.load(tmp_path)
    assert again.encode(text) == tokenizer.encode(text) == Tokenizer.parse(tokenizer.dump()).encode(text)
    assert again.tags == tokenizer.tags
    assert HuggingFace.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == tokenizer.encode(text)
