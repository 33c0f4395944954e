"""Text to token ids and back: byte-level BPE, trained for the tiny policy or loaded from a ``tokenizer.json``.

The tiny policy's pre-tokenizer keeps a path such as ``kit/core.py`` in one piece, so that a frequent path becomes one
id; it separates digits, so that numbers are copied digit by digit; and it joins a newline with its indentation. All
256 bytes are in the alphabet, hence any text can be encoded and decodes to itself.

Content from outside never becomes an added token (``</result>``, ``<|im_end|>``, ``<think>``). Two backends of one
file ensure it: the full one matches added tokens, the plain one has none. The library's own switch
(``encode_special_tokens``) is not enough: it ignores added tokens that are marked ``special: false``, such as Qwen3's
``<think>`` and ``<tool_call>``. Trade-off: the vocabulary is in memory twice.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Backend

from headrace.rendering import schemas

_PIECES = (
    r"[A-Za-z_]+(?:/[A-Za-z_]+)*\.(?:py|md|toml|txt|cfg)(?![A-Za-z_])"
    r"| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z0-9_]+|\n+ *(?= \S)|\n+ *|[ \t]+(?!\S)|\s+"
)


Piece = tuple[str, bool]
"""Text, and whether it belongs to the format (a tag, a template's own text) rather than to content from outside."""

_CACHED_CHARACTERS, _CACHED_TEXTS = 32, 16384
"""Longest text whose ids are cached, and how many: paths, numbers and short answers repeat often."""


_BYTE, _LOW = re.compile("<0x[0-9A-F]{2}>"), -1e9
"""Pieces that stand for bytes without a piece of their own, and a score that no text prefers."""


def _plain(backend: _Backend) -> _Backend:
    """The same tokenizer without added tokens, so that no text can match one."""
    fields = json.loads(backend.to_str())
    model = fields["model"]
    names = {token["content"] for token in fields["added_tokens"]}
    fields["added_tokens"], fields["post_processor"] = [], None
    # Some files list the added tokens in the vocabulary too, where plain text would match them.
    if model["type"] == "Unigram":
        nonce = secrets.token_hex(16)  # nobody's text; the place of a piece is its id
        model["vocab"] = [
            [f"{nonce}{id}" if text in names else text, _LOW if _BYTE.fullmatch(text) else score]
            for id, (text, score) in enumerate(model["vocab"])
        ]
    else:
        if model["type"] == "BPE":
            pairs = [tuple(each.split(" ", 1)) if isinstance(each, str) else tuple(each) for each in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names]
        unknown = model.get("unk_token")  # unknown text is that token anyway
        model["vocab"] = {text: id for text, id in model["vocab"].items() if text not in names or text == unknown}
    return _Backend.from_str(json.dumps(fields))


class Tokenizer:
    """Text to ids and back. `encode` gives plain ids only; `encode_pieces` also those of a format's added tokens."""

    def __init__(self, backend: _Backend) -> None:
        backend.encode_special_tokens = False
        self._backend = backend
        self._plain = _plain(backend)
        self._cache: dict[str, list[int]] = {}
        self._added = {token.content: (id, token) for id, token in backend.get_added_tokens_decoder().items()}
        self._tags = {content: id for content, (id, _) in self._added.items()}
        self._added_ids = frozenset(self._tags.values())
        longest_first = sorted((content for content in self._tags if content), key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int = 640, tags: Sequence[str] | None = None) -> "Tokenizer":
        """Learn at most `vocab` ids, tags (by default those of the terse format) and all bytes included."""
        names = list(schemas.tags() if tags is None else tags)
        if vocab < 256 + len(names):
            raise ValueError(f"a vocabulary of {vocab} is too small: 256 bytes and the tags need {256 + len(names)}")
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
        """Plain ids of any text; none of them is an added token."""
        ids = self._cache.get(text)
        if ids is None:
            ids = list(self._plain.encode(text, add_special_tokens=False).ids)
            if len(text) <= _CACHED_CHARACTERS and len(self._cache) < _CACHED_TEXTS:
                self._cache[text] = ids
        return list(ids)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered conversation: added tokens come from the format's pieces only.

        Where no content spells (part of) an added token, the ids are those of the joined text under the full backend,
        as Hugging Face gives them: encoding frame and content apart would change the merges where they meet. Elsewhere
        the text is split at the format's added tokens, and the text between two of them is encoded as plain text.
        """
        text = "".join(part for part, _ in pieces)
        spans: list[tuple[int, int]] = []
        at = 0
        for part, is_format in pieces:
            if is_format and spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + len(part))
            elif is_format:
                spans.append((at, at + len(part)))
            at += len(part)
        matches = [match.span() for match in self._added_pattern.finditer(text)]
        if all(any(a <= start and end <= b for a, b in spans) for start, end in matches):
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            # A normalizer may make an added token of a text that does not spell one.
            if sum(id in self._added_ids for id in ids) == len(matches):
                return ids
        return self._encode_apart(pieces)

    def _encode_apart(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        run, strip_next = "", False
        for part, is_format in pieces:
            at = 0
            for match in self._added_pattern.finditer(part) if is_format else ():
                id, token = self._added[match.group()]
                run += part[at : match.start()]
                run = run.lstrip() if strip_next else run
                ids += [*self.encode(run.rstrip() if token.lstrip else run), id]
                run, strip_next, at = "", bool(token.rstrip), match.end()
            run += part[at:]
        return ids + self.encode(run.lstrip() if strip_next else run)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, tags spelled out; bytes that are not UTF-8 come back as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def whole_within(self, ids: Sequence[int], characters: int, known: int = 0) -> int:
        """The number of leading ids whose text lies within the first `characters` of the text of `ids`. known: leading
        ids that do, from an earlier call with fewer characters."""
        if not characters:
            return 0
        # An unfinished character decodes to U+FFFD, so the length never falls as ids are added.
        counts = range(len(ids) + 1)
        return bisect_right(counts, characters, lo=known, key=lambda count: len(self.decode(ids[:count]))) - 1

    def tag(self, text: str) -> int | None:
        """The id of an added token, None when this tokenizer has none of that spelling."""
        return self._tags.get(text)

    @property
    def tags(self) -> dict[str, int]:
        """Ids of added tokens by spelling."""
        return dict(self._tags)
