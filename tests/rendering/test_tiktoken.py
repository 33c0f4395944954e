"""A tiktoken vocabulary becomes a tokenizer.json that gives the ids of tiktoken's own joining."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]

from headrace.rendering import tiktoken
from headrace.rendering.base import RendererError
from headrace.rendering.bundle import checkpoint_bundle
from headrace.rendering.tokenizer import Tokenizer
from tests.support import chat_formats, chat_packages

NAMED = [*chat_formats.SPECIAL, *chat_formats.NOT_SPECIAL]
TEXTS = (
    "def mean(xs):\n    return sum(xs) / len(xs)\n\n\n# It's 12345 lines, isn't it?",
    "中文English混合 北京市 Pascal",
    "é🙂 ünï ÀÉÎ Ǆenan ab中文cd",
    "  \n\t x\r\n\r\n  ",
    "search read_file edit_file search",
    "",
)


def ranks() -> dict[bytes, int]:
    """The tokens of the tests' tiny tokenizer, ranked in the order in which it learned them."""
    vocabulary = json.loads(chat_formats.tokenizer_json())["model"]["vocab"]
    byte_of = {letter: byte for byte, letter in tiktoken._letters().items()}
    learned = sorted((text for text in vocabulary if all(letter in byte_of for letter in text)), key=vocabulary.get)
    tokens = [bytes(byte_of[letter] for letter in text) for text in learned if text != "<pad>"]
    return {token: rank for rank, token in enumerate(tokens)}


def folder(place: Path, **changes: Any) -> Path:
    """A checkpoint as Kimi's: tiktoken.model, and added tokens behind it, some without a name."""
    place.mkdir()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (place / tiktoken.FILE).write_text("\n".join(lines) + "\n", encoding="ascii")
    added = {
        str(len(lines) + 2 * at): {"content": text, "special": text in chat_formats.SPECIAL}
        for at, text in enumerate(NAMED)
    }
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    (place / "chat_template.jinja").write_text(chat_formats.TEMPLATES["kimi_k2"], encoding="utf-8")
    (place / "config.json").write_text("{}", encoding="utf-8")
    return place


def joined(text: str) -> list[int]:
    """tiktoken's way: in each piece, the two neighbours whose join has the lowest rank are joined, again and again."""
    table, ids = ranks(), []
    for piece in regex.findall(tiktoken.KIMI, text, regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            joins = [(table[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in table]
            if not joins:
                break
            _, at = min(joins)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [table[part] for part in parts]
    return ids


def test_ids_are_those_of_tiktoken_and_added_tokens_have_their_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.parse(tiktoken.converted(folder(tmp_path / "kimi")))
    for text in TEXTS:
        assert tokenizer.encode(text) == joined(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    first = len(ranks())
    assert tokenizer.tag(NAMED[3]) == first + 6 and tokenizer.tag(f"<|reserved_token_{first + 1}|>") == first + 1
    assert len(tokenizer) == first + 256
    assert tokenizer.encode_pieces([("<|im_end|>", True), ("<|im_end|>", False)])[0] == tokenizer.tag("<|im_end|>")
    assert tokenizer.tag("<|im_end|>") not in tokenizer.encode("<|im_end|>")


def test_a_folder_of_kimi_needs_no_tokenizer_json(tmp_path: Path) -> None:
    bundle = checkpoint_bundle(folder(tmp_path / "kimi"))
    assert bundle.renderer == "kimi_k2"
    assert Tokenizer.parse(bundle.tokenizer_json).tag("<|im_end|>") in bundle.eos_ids


@pytest.mark.parametrize(
    ("lines", "changes", "says"),
    [
        (
            None,
            {"tokenizer_class": "QWenTokenizer"},
            "expected the tokenizer_class TikTokenTokenizer of Kimi, got 'QWen",
        ),
        (
            None,
            {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}},
            "expected ids of added tokens from .* got 7",
        ),
        (None, {"added_tokens_decoder": {"x": {}}}, "tokenizer_config.json is damaged"),
        ("IQ== 0\n!! 1\n", {}, r"tiktoken.model, line 2: expected base64 and a rank, got b'!! 1'"),
        ("IQ== 0\nIg== 5\n", {}, r"tiktoken.model: expected the ranks 0, 1, ... and every byte"),
    ],
)
def test_another_tokenizer_or_a_damaged_file_is_refused_by_name(
    tmp_path: Path, lines: str | None, changes: dict[str, Any], says: str
) -> None:
    place = folder(tmp_path / "kimi", **changes)
    if lines is not None:
        (place / tiktoken.FILE).write_text(lines, encoding="ascii")
    with pytest.raises(RendererError, match=says):
        checkpoint_bundle(place)


@pytest.mark.slow
def test_the_real_vocabulary_of_kimi_gives_the_ids_of_another_encoder(tmp_path: Path) -> None:
    assert chat_packages.vocabulary("kimi_k2").pattern == tiktoken.KIMI
    tokenizer = Tokenizer.parse(chat_packages.tokenizer_files("kimi_k2")[0])
    conversation = f"<|im_user|>user<|im_middle|>{TEXTS[0]}<|im_end|>"
    source = Path(__file__).read_text(encoding="utf-8").replace("<|", "< |")
    texts = [*TEXTS, source, "Ünïcödé ÇA VA 你好，世界！ こんにちは 1234567890 don't WE'LL\t\t\n\n \n x"]
    pieces = [[(text, False)] for text in texts] + [[(conversation, True)]]
    assert [tokenizer.encode_pieces(each) for each in pieces] == chat_packages.peer_ids(
        "kimi_k2", [*texts, conversation]
    )
