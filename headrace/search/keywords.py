"""Keyword scores: Okapi BM25 over the words of identifiers (Robertson and Zaragoza, 2009; k1 = 1.2, b = 0.75)."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


class Bag(dict[str, int]):
    """The words of one chunk with their counts."""

    __slots__ = ("length",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.length = 0
        for word, count in Counter(_WORD.findall(text)).items():  # code repeats few words
            word = _plain(word)
            self[word] = self.get(word, 0) + count
            self.length += count


def words(text: str) -> list[str]:
    """Lower-case words; snake and camel case are split, a plural s is removed."""
    return [_plain(word) for word in _WORD.findall(text)]


@lru_cache(1 << 16)
def _plain(word: str) -> str:
    word = word.lower()
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


Postings = dict[str, list[tuple[int, int]]]
"""Word to (position of a chunk, count), positions in their order."""


def postings(bags: Sequence[Bag]) -> Postings:
    """The words of some chunks, such as those of one file; positions count from 0."""
    places: Postings = {}
    for at, bag in enumerate(bags):
        for word, count in bag.items():
            places.setdefault(word, []).append((at, count))
    return places


def postings_of(query: str, bags: Sequence[Bag]) -> Postings:
    """`postings` of a query's words alone: one search costs less than all words of new files."""
    return {word: [(at, bag[word]) for at, bag in enumerate(bags) if word in bag] for word in set(words(query))}


def scores(query: str, parts: Sequence[tuple[int, Postings]], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """One score per chunk; 0 where it shares no word with the query. parts: the postings of each file with the position
    of its first chunk. lengths: words of each chunk."""
    total = np.zeros(len(lengths))
    around = 1.2 * (0.25 + 0.75 * lengths / max(float(lengths.sum()) / max(1, len(lengths)), 1.0))
    for word in sorted(set(words(query))):
        hits = [(first + at, count) for first, part in parts for at, count in part.get(word, ())]
        if not hits:
            continue
        rarity = math.log(1 + (len(lengths) - len(hits) + 0.5) / (len(hits) + 0.5))
        places, counts = np.array(hits).T
        total[places] += rarity * counts * 2.2 / (counts + around[places])
    return total
