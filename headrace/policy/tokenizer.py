"""Byte-level BPE, trained on the spot for the tiny policy or loaded from a checkpoint's ``tokenizer.json``.

Why our own pieces: a path such as ``kit/core.py`` is one piece, so that a frequent one becomes a single id; digits
stand alone, so that numbers are copied digit by digit; a newline takes its indentation along. All 256 bytes are in
the alphabet, hence any text can be encoded and decodes to itself. Tags of the format are ids of their own that
`encode` never gives: a tool's output which spells ``</result>`` comes out as plain bytes and can't pretend to be
the frame around it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Backend

from headrace.policy import schemas

_PIECES = (
    r"[A-Za-z_]+(?:/[A-Za-z_]+)*\.(?:py|md|toml|txt|cfg)(?![A-Za-z_])"
    r"| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z0-9_]+|\n+ *(?= \S)|\n+ *|[ \t]+(?!\S)|\s+"
)


_SHORT, _KEPT = 32, 16384
"""Texts of so many characters are remembered, so many of them: paths, numbers and answers come again and again."""


class Tokenizer:
    """Text to ids and back. `tag` gives the id of a special token; `encode` gives only plain ones."""

    def __init__(self, backend: _Backend) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self._short: dict[str, list[int]] = {}
        self._tags = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int = 640, tags: Sequence[str] | None = None) -> "Tokenizer":
        """Learn at most `vocab` ids, tags (by default those of the terse format) and all bytes included."""
        names = list(schemas.tags() if tags is None else tags)
        if vocab < 256 + len(names):
            raise ValueError(f"a vocabulary of {vocab} has no room for 256 bytes and {len(names)} tags")
        backend = _Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a ``tokenizer.json``, or the one in a checkpoint's folder."""
        file = Path(path)
        return cls(_Backend.from_file(str(file / "tokenizer.json" if file.is_dir() else file)))

    @classmethod
    def parse(cls, text: str) -> "Tokenizer":
        """A tokenizer from the text of a ``tokenizer.json``."""
        return cls(_Backend.from_str(text))

    def dump(self) -> str:
        """The text of its ``tokenizer.json``."""
        return str(self._backend.to_str())

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json`` that Hugging Face's libraries read."""
        self._backend.save(str(path))

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Plain ids of any text; no special token comes out, whatever the text spells."""
        ids = self._short.get(text)
        if ids is None:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if len(text) <= _SHORT and len(self._short) < _KEPT:
                self._short[text] = ids
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, tags spelled out; bytes that are not UTF-8 come back as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def tag(self, text: str) -> int | None:
        """The id of a special token, None when this tokenizer has none of that spelling."""
        return self._tags.get(text)

    @property
    def tags(self) -> dict[str, int]:
        """Special tokens by spelling."""
        return dict(self._tags)
