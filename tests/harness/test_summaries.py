"""Limits of self-summarisation: context kept free for the summary, a cap per attempt, no summary that grows."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from headrace.harness.loop import Episode, run_episode
from headrace.harness.prompt import initial_prompt
from headrace.harness.rendered import differing
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, Turn
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
    limits = Limits(max_tokens=9000, context_tokens=size + 20, reserve_tokens=20)
    got = await episode(limits, look, text(renderer, "the bug"), finish)
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


async def test_a_result_longer_than_the_reserve_is_cut_so_that_the_summary_fits_the_window(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    log = "\n".join(f"line {number} of a long log" for number in range(900))
    task = msgspec.structs.replace(made.task, files={"log.txt": log.encode(), "short.txt": b"short"})
    look = renderer.turn([("read_file", {"path": "log.txt"}), ("read_file", {"path": "short.txt"})])
    rest = renderer.turn([("read_file", {"path": "log.txt", "lines": "450-451"})])
    turns = [look, text(renderer, "the log is long"), rest, renderer.turn([("finish", {})])]
    limits = Limits(max_tokens=9000, context_tokens=1000, reserve_tokens=250)
    request = request_for(task.ref, limits, Sampling(max_turn_tokens=100))

    async def run(*turns: list[int], resume: Sequence[Turn] = ()) -> tuple[Episode, list[int]]:
        engine = played(*turns)
        sandbox = LocalFiles(task.files)
        got = await run_episode(
            engine=engine, sandbox=sandbox, renderer=renderer, request=request, task=task, resume=resume
        )
        return got, [len(asked.ids) + asked.sampling.max_turn_tokens for asked in engine.asked]

    got, windows = await run(*turns)
    assert [turn.kind for turn in got.turns] == ["act", "summary", "act", "act"] and got.outcome == "finished"
    assert 900 < max(windows) <= 1000
    long, short = got.turns[0].results
    assert long.truncated and "characters cut" in long.output and len(long.output) > 500
    assert short.output == "1:short" and not short.truncated
    assert "line 449 of" not in long.output and "line 449 of" in got.turns[2].results[0].output

    assert differing(got.turns, initial_prompt(request, task), renderer, limits.max_parallel_calls) == ()
    open_turn = msgspec.structs.replace(got.turns[0], results=())
    resumed, _ = await run(*turns[1:], resume=[open_turn])
    assert [turn.prompt_ids for turn in resumed.turns] == [turn.prompt_ids for turn in got.turns]
