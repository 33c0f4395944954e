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


def scores(query: str, bags: Sequence[Bag], mean_length: float) -> NDArray[np.float64]:
    """One score per bag; 0 where it shares no word with the query."""
    total = np.zeros(len(bags))
    lengths: NDArray[np.float64] | None = None
    for word in sorted(set(words(query))):
        counts = np.array([bag.get(word, 0) for bag in bags], dtype=np.float64)
        holding = int(np.count_nonzero(counts))
        if not holding:
            continue
        if lengths is None:
            lengths = np.array([bag.length for bag in bags], dtype=np.float64)
            lengths = 1.2 * (0.25 + 0.75 * lengths / max(mean_length, 1.0))
        rarity = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        total += rarity * counts * 2.2 / (counts + lengths)
    return total
