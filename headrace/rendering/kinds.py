"""Counts a turn's sampled tokens by kind: thinking, calls, and the rest.

The parser gives the characters of each kind. Prefixes of the sampled ids are decoded until the end of these characters
is reached: no text is encoded again, because another encoding may have another length. A token with characters of two
kinds counts for the later one.
"""

from collections.abc import Iterable, Iterator, Sequence

from headrace.messages.rollout import TokenKinds
from headrace.rendering.parsers.base import Part
from headrace.rendering.tokenizer import Tokenizer


def places(tokenizer: Tokenizer, ids: Sequence[int], parts: Iterable[Part]) -> Iterator[tuple[str, int, int]]:
    """The ids first..last-1 of each part. parts: of the text of `ids`, in order and without overlap."""
    at = before = 0  # characters, and the ids within them, up to the end of the last part
    for kind, start, end in parts:
        first = before if start == at else tokenizer.whole_within(ids, start, before)
        at, before = end, tokenizer.whole_within(ids, end, first)
        yield kind, first, before


def token_kinds(tokenizer: Tokenizer, ids: Sequence[int], parts: Iterable[Part], forced: int = 0) -> TokenKinds:
    """The sampled tokens of a turn by kind. parts: as in `places`. forced: the first ids that were not sampled."""
    counts = {"thinking": 0, "call": 0}
    for kind, first, last in places(tokenizer, ids, parts):
        counts[kind] += max(0, last - max(first, forced))
    return TokenKinds(thinking=counts["thinking"], calls=counts["call"])
