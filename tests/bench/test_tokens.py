"""The tokens of an attempt by kind, with those that the renderer counted."""

from msgspec import UNSET, UnsetType

from headrace.bench.tokens import tokens_of
from headrace.messages.base import Array
from headrace.messages.rollout import TokenKinds, Turn


def turn(index: int, segment: int, sampled: int, kinds: TokenKinds | UnsetType, *, summary: bool = False) -> Turn:
    return Turn(
        index=index, segment=segment, prompt_ids=Array.of([1, 2], "<i4"), ids=Array.of([3] * sampled, "<i4"),
        logprobs=Array.of([-1.0] * sampled, "<f4"), kind="summary" if summary else "act", kinds=kinds,
    )  # fmt: skip


def test_sampled_tokens_are_those_of_the_record_and_a_summary_stands_apart() -> None:
    turns = [
        turn(0, 0, 9, TokenKinds(thinking=4, calls=3)),
        turn(1, 0, 5, TokenKinds(thinking=2, calls=0), summary=True),
        turn(2, 1, 7, TokenKinds(thinking=0, calls=6)),
    ]
    tokens = tokens_of(turns)
    assert (tokens.acting, tokens.thinking, tokens.calls, tokens.text, tokens.summary) == (16, 4, 9, 3, 5)
    assert tokens.total == 16 + 5 + 3 * 2
    without_count = turn(1, 0, 5, UNSET, summary=True)
    assert tokens_of([turns[0], without_count, turns[2]]).thinking == 4, "the kinds of a summary are not asked for"


def test_one_turn_without_a_count_leaves_the_attempt_without_one() -> None:
    tokens = tokens_of([turn(0, 0, 9, TokenKinds(thinking=4, calls=3)), turn(1, 0, 7, UNSET)])
    assert (tokens.acting, tokens.thinking, tokens.calls, tokens.text) == (16, None, None, None)
