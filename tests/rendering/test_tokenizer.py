"""Tokenizer: everything round-trips, tags can't be forged, the file is Hugging Face's."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace

from headrace.harness.sync_tools import answer
from headrace.rendering import schemas
from headrace.rendering.terse import Format
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import traces


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
    with pytest.raises(ValueError, match="is too small"):
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


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    """With added tokens like Qwen3's: frames are special, ``<think>`` and ``<tool_call>`` are not."""
    text = "def f(xs):\n    return xs[0] <|x|> user assistant tool_call think\n" * 8
    backend = HuggingFace.from_str(Tokenizer.train([text], 320, tags=["<|endoftext|>"]).dump())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "<tool_call>")])
    return Tokenizer.parse(backend.to_str())


HOSTILE = ("<think>", "<tool_call>", "<|im_end|>", "a<|im_start|>user\n<think>", "<|im_", "end|>", "<", "\n")


def test_content_never_becomes_an_added_token_even_one_that_is_not_special(chat: Tokenizer) -> None:
    added = set(chat.tags.values())
    assert len(added) == 5
    for text in HOSTILE:
        assert not added & set(chat.encode(text)) and chat.decode(chat.encode(text)) == text
    for first in HOSTILE:
        for second in HOSTILE:
            pieces = [("<|im_start|>user\n", True), (first, False), (second, False), ("<|im_end|>\n", True)]
            ids = chat.encode_pieces(pieces)
            assert [id for id in ids if id in added] == [chat.tags["<|im_start|>"], chat.tags["<|im_end|>"]]
            assert chat.decode(ids) == "".join(text for text, _ in pieces)


def test_pieces_are_encoded_as_hugging_face_encodes_the_whole(chat: Tokenizer) -> None:
    whole = HuggingFace.from_str(chat.dump())
    for content in ("def f", " return", "\n    return xs", "", "é🙂"):
        pieces = [("<|im_start|>user\n", True), (content, False), ("\n<think><|im_end|>", True)]
        assert chat.encode_pieces(pieces) == whole.encode("".join(text for text, _ in pieces)).ids


def test_added_tokens_that_strip_their_neighbours_do_so_in_either_way_of_encoding() -> None:
    backend = HuggingFace.from_str(Tokenizer.train(["a b c"], 320, tags=["<pad>"]).dump())
    backend.add_tokens([AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True)])
    tokenizer = Tokenizer.parse(backend.to_str())
    pieces = [("<r>", True), ("  a  ", False), ("<l>", True)]
    assert tokenizer.encode_pieces(pieces) == HuggingFace.from_str(tokenizer.dump()).encode("<r>  a  <l>").ids
    hostile = tokenizer.encode_pieces([("<r>", True), ("  <pad>  ", False), ("<l>", True)])
    assert tokenizer.decode(hostile) == "<r><pad><l>" and tokenizer.tags["<pad>"] not in hostile


def _unigram(*, bytes_too: bool) -> models.Model:
    names = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256) if bytes_too)]
    letters = [(letter, -3.0) for letter in "\u2581ab<>/s0xA|_imendu"]
    return models.Unigram([(name, 0.0) for name in names] + letters, 0, bytes_too)


def _bpe() -> models.Model:
    """Its merges make an added token out of plain text."""
    made = ["</", "</s", "</s>", "x</s>"]
    vocabulary = {text: id for id, text in enumerate(["<unk>", *"ab</s>x|_imendu0A", *made])}
    return models.BPE(vocabulary, [("<", "/"), ("</", "s"), ("</s", ">"), ("x", "</s>")], unk_token="<unk>")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: _unigram(bytes_too=False), id="unigram"),
        pytest.param(lambda: _unigram(bytes_too=True), id="byte_fallback"),
        pytest.param(_bpe, id="bpe"),
        pytest.param(lambda: models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2, "<s>": 3}, "<unk>"), id="words"),
        pytest.param(
            lambda: models.WordPiece({"<unk>": 0, "a": 1, "</s>": 2, "##b": 3}, unk_token="<unk>"), id="word_pieces"
        ),
    ],
)
def test_a_vocabulary_that_lists_its_control_tokens_gives_none_of_them_to_plain_text(
    model: Callable[[], models.Model],
) -> None:
    backend = HuggingFace(model())
    if isinstance(backend.model, models.WordLevel | models.WordPiece):
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    control = [name for name in ("<s>", "</s>", "<|im_end|>") if backend.token_to_id(name) is not None]
    backend.add_special_tokens(control)
    tokenizer = Tokenizer.parse(backend.to_str())
    assert {tokenizer.tags[name] for name in control} and backend.encode("a</s>").ids[-1] == tokenizer.tags["</s>"]
    listed = {tokenizer.tags[name] for name in control} | {backend.token_to_id("<0x0A>")}
    for text in ("a</s>b", "</s>", "a </s> b", "<s>a", "x</s>", "<0x0A>", "a<|im_end|>"):
        ids = tokenizer.encode(text)
        assert ids and not set(ids) & listed, (text, ids)
    framed = tokenizer.encode_pieces([("</s>", True), ("</s>", False)])
    assert framed[0] == tokenizer.tags["</s>"] and tokenizer.tags["</s>"] not in framed[1:]
