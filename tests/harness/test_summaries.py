"""Limits of self-summarisation: context kept free for the summary, a cap per attempt, no summary that grows."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.harness.loop import Episode, run_episode
from headrace.messages.rollout import Limits, RolloutRequest, Sampling
from headrace.rendering.terse import TerseRenderer
from headrace.tasks.generated.repositories import Made, make
from headrace.tasks.local import LocalFiles

pytestmark = pytest.mark.anyio
Request = Callable[..., RolloutRequest]
Play = Callable[..., Any]


@pytest.fixture(scope="module")
def made() -> Made:
    return make("train", 77)


@pytest.fixture
def episode(renderer: TerseRenderer, request_for: Request, played: Play, made: Made) -> Callable[..., Any]:
    async def run(limits: Limits, *turns: list[int]) -> Episode:
        return await run_episode(
            engine=played(*turns),
            sandbox=LocalFiles(made.task.files),
            renderer=renderer,
            request=request_for(made.task.ref, limits, Sampling(max_turn_tokens=4000)),
            task=made.task,
        )

    return run


def text(renderer: TerseRenderer, words: str) -> list[int]:
    return [*renderer.tokenizer.encode(words), *renderer.stop_ids]


async def full_after_one_look(episode: Callable[..., Any], look: list[int], finish: list[int]) -> int:
    """Context that a segment has after its first call was answered."""
    turns = (await episode(Limits(max_tokens=9000), look, finish)).turns
    return len(turns[0].prompt_ids) + len(look) + len(turns[1].prompt_ids)


async def test_a_reserve_asks_for_the_summary_so_much_earlier(
    episode: Callable[..., Any], renderer: TerseRenderer, made: Made
) -> None:
    look, finish = renderer.turn([("read_file", {"path": made.path})]), renderer.turn([("finish", {})])
    size = await full_after_one_look(episode, look, finish)
    ample = Limits(max_tokens=9000, context_tokens=size + 20)
    assert [turn.kind for turn in (await episode(ample, look, finish)).turns] == ["act", "act"]
    kept = Limits(max_tokens=9000, context_tokens=size + 20, reserve_tokens=20)
    got = await episode(kept, look, text(renderer, "the bug"), finish)
    assert [turn.kind for turn in got.turns] == ["act", "summary", "act"] and got.outcome == "finished"


async def test_one_summary_more_than_allowed_ends_the_attempt(
    episode: Callable[..., Any], renderer: TerseRenderer, made: Made
) -> None:
    look, finish = renderer.turn([("read_file", {"path": made.path})]), renderer.turn([("finish", {})])
    size = await full_after_one_look(episode, look, finish)
    summary = text(renderer, "the bug")
    limits = Limits(max_turns=20, max_tokens=9000, context_tokens=size, max_summaries=2)
    got = await episode(limits, *[look, summary] * 3, finish)
    assert got.outcome == "context" and [turn.kind for turn in got.turns] == ["act", "summary"] * 3


async def test_a_summary_that_is_no_shorter_than_its_segment_ends_the_attempt(
    episode: Callable[..., Any], renderer: TerseRenderer, made: Made
) -> None:
    look, finish = renderer.turn([("read_file", {"path": made.path})]), renderer.turn([("finish", {})])
    size = await full_after_one_look(episode, look, finish)
    limits = Limits(max_tokens=20_000, context_tokens=size)
    got = await episode(limits, look, text(renderer, "again and again " * size), finish)
    assert got.outcome == "context" and [turn.kind for turn in got.turns] == ["act", "summary"]
    assert got.turns[-1].stop == "stop"
