"""Converts a tiktoken vocabulary, which Kimi's checkpoints have, into a tokenizer.json.

Such a folder holds tiktoken.model (one line per token: base64 of its bytes, and its rank), the names of added tokens in
tokenizer_config.json, and Python code with the pattern that splits a text. The code of a checkpoint is never run, so
the pattern is written here. tiktoken joins any two neighbours whose join is a token, lowest rank first; so every cut
of every token into two tokens is a merge, in the order of the ranks of their joins.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.rendering.base import RendererError

FILE = "tiktoken.model"
_RESERVED = 256
"""Added tokens behind the vocabulary of a Kimi tokenizer, most of them without a name of their own."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{first}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for first in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pieces of a text, in each of which tokens are joined (TikTokenTokenizer of Kimi-K2)."""


def converted(folder: Path) -> str:
    """The tokenizer.json of a Kimi folder. RendererError for files of another tokenizer, or damaged ones."""
    config: dict[str, Any] = {}
    try:
        lines = (folder / FILE).read_bytes().splitlines()
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        kind = config.get("tokenizer_class")
        named = {int(id): entry for id, entry in (config.get("added_tokens_decoder") or {}).items()}
        spelled = {id: str(entry["content"]) for id, entry in named.items()}
    except OSError as error:
        raise RendererError(f"{folder}: {Path(str(error.filename)).name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RendererError(f"{folder / 'tokenizer_config.json'} is damaged: {error!r}") from None
    if kind != "TikTokenTokenizer":
        raise RendererError(
            f"{folder / FILE}: expected the tokenizer_class TikTokenTokenizer of Kimi, got {kind!r}, whose pattern is "
            "not known; write a tokenizer.json with the model's own tokenizer"
        )
    ranks = _ranks(lines, folder / FILE)
    reserved = range(len(ranks), len(ranks) + _RESERVED)
    if odd := sorted(id for id in spelled if id not in reserved):
        raise RendererError(
            f"{folder / 'tokenizer_config.json'}: expected ids of added tokens from {reserved.start} to "
            f"{reserved.stop - 1}, got {odd[0]}"
        )
    added = {id: spelled.get(id, f"<|reserved_token_{id}|>") for id in reserved}
    plain = {id for id, entry in named.items() if entry.get("special") is False}
    return tokenizer_json(ranks, KIMI, added, plain)


def _ranks(lines: list[bytes], file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise RendererError(f"{file}, line {number}: expected base64 and a rank, got {line[:40]!r}") from None
    if sorted(ranks.values()) != list(range(len(lines))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise RendererError(f"{file}: expected the ranks 0, 1, ... and every byte among the tokens")
    return ranks


def tokenizer_json(
    ranks: Mapping[bytes, int], pattern: str, added: Mapping[int, str], plain: frozenset[int] | set[int] = frozenset()
) -> str:
    """The text of a tokenizer.json.

    ranks: of tokens by their bytes, all single bytes included. pattern: the pieces of a text, for Oniguruma. added: id
    to spelling of the added tokens; plain: those among them that are not special.
    """
    letters = _letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, ranks[token[:at]], ranks[token[at:]], spelled[token[:at]], spelled[token[at:]])
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    merges.sort()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, **flags, "special": id not in plain} for id, text in sorted(added.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken, too, looks a whole piece up first
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [merge[3:] for merge in merges],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it is printable in Latin-1."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
