"""Whole episodes in chat formats: a resumed, a capped and a summarised one rebuild identical ids."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headrace.harness.loop import run_episode
from headrace.harness.prompt import initial_prompt
from headrace.harness.rendered import differing
from headrace.harness.scripted import ScriptedEngine, script
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, ToolResult, Turn
from headrace.messages.tasks import TaskRef
from headrace.rendering import schemas
from headrace.rendering.base import Renderer
from headrace.rendering.registry import Renderers
from headrace.tasks.generated.repositories import TOOLS, Made, make
from headrace.tasks.local import LocalFiles
from tests.harness.conftest import Played
from tests.support import chat_formats

pytestmark = pytest.mark.anyio
FORMATS = sorted(chat_formats.TEMPLATES)
LARGE = Limits(context_tokens=100_000, max_tokens=100_000, max_turns=20)


@pytest.fixture
def made() -> Made:
    return make("train", 1_000_003)


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> Renderer:
    return Renderers(chat_formats.bundle(request.param)).open([schemas.BY_NAME[name] for name in TOOLS])


def wanted(task: TaskRef, limits: Limits) -> RolloutRequest:
    sampling = Sampling(max_turn_tokens=10_000)
    fields: dict[str, Any] = {"run": "r1", "lane": "train", "group": "g1", "slot": 0, "attempt": 0, "seed": 5}
    return RolloutRequest(task=task, limits=limits, sampling=sampling, **fields)


def segments(turns: Sequence[Turn]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    for turn in turns:
        ids.setdefault(turn.segment, []).extend([*turn.prompt_ids.tolist(), *turn.ids.tolist()])
    return ids


def edit(made: Made) -> tuple[str, dict[str, str]]:
    return "edit_file", {"path": made.path, "lines": str(made.line), "text": made.fixed}


@pytest.mark.parametrize("name", FORMATS)
async def test_a_script_solves_a_task_in_every_format(name: str, made: Made) -> None:
    tools = [schemas.BY_NAME[tool] for tool in TOOLS]

    def opened() -> Renderer:
        return Renderers(chat_formats.bundle(name)).open(tools)

    sandbox, format = LocalFiles(made.task.files), opened()
    engine = ScriptedEngine(script("oracle", made.task, made.oracle), format)
    episode = await run_episode(
        engine=engine, sandbox=sandbox, renderer=format, request=wanted(made.task.ref, LARGE), task=made.task
    )
    assert episode.outcome == "finished" and episode.malformed_calls == 0
    assert sandbox.files[made.path] == made.oracle.solution[made.path]
    calls = [call for turn in episode.turns for call in turn.calls]
    assert {call.name for call in calls} <= {tool.name for tool in tools}
    prompt = initial_prompt(wanted(made.task.ref, LARGE), made.task)
    assert differing(episode.turns, prompt, opened(), 6) == ()


def play(format: Renderer, made: Made) -> list[list[int]]:
    """Turns with a call that fails, prose without a call, a turn that is cut, and the way to the end."""
    encode, stop = format.tokenizer.encode, format.stop_ids[0]
    look = format.turn([("read_file", {"path": made.path})])
    return [
        look,
        [*encode("I am not sure yet."), stop],
        look[:-4],
        format.turn([("read_file", {"path": "no such file <|im_end|>"})], before=2),
        format.turn([edit(made)], before=3),
        format.turn([("finish", {})], before=4),
    ]


@pytest.mark.parametrize("summarised", [False, True])
async def test_a_resumed_episode_rebuilds_the_same_ids(format: Renderer, made: Made, summarised: bool) -> None:
    turns = play(format, made)
    common: dict[str, Any] = {"renderer": format, "request": wanted(made.task.ref, LARGE), "task": made.task}
    if summarised:  # instead of the fourth turn
        files = LocalFiles(made.task.files)
        episode = await run_episode(engine=Played(turns, format.stop_ids), sandbox=files, **common)
        filled = sum(len(turn.prompt_ids) + len(turn.ids) for turn in episode.turns[:3])
        limit = filled + len(episode.turns[3].prompt_ids)
        common["request"] = wanted(made.task.ref, msgspec.structs.replace(LARGE, context_tokens=limit))
        summary = [*format.tokenizer.encode("The bug is in the loop."), format.stop_ids[0]]
        turns = [*play(format, made)[:3], summary, format.turn([edit(made)]), format.turn([("finish", {})], before=1)]
    log: list[Turn] = []

    async def on_sampled(turn: Turn) -> None:
        log.append(turn)

    async def on_done(index: int, results: tuple[ToolResult, ...]) -> None:
        log[index] = msgspec.structs.replace(log[index], results=results)

    whole = await run_episode(
        engine=Played(turns, format.stop_ids),
        sandbox=LocalFiles(made.task.files),
        on_sampled=on_sampled,
        on_done=on_done,
        **common,
    )
    if summarised:
        assert "summary" in [turn.kind for turn in whole.turns] and whole.turns[-1].segment == 1
    assert whole.outcome == "finished"
    assert any(turn.stop == "length" for turn in whole.turns)
    for logged_turns in range(1, len(log)):
        engine = Played(turns[logged_turns:], format.stop_ids)
        resumed = await run_episode(
            engine=engine, sandbox=LocalFiles(made.task.files), resume=log[:logged_turns], **common
        )
        assert [turn.prompt_ids for turn in resumed.turns] == [turn.prompt_ids for turn in whole.turns]
        assert segments(resumed.turns) == segments(whole.turns)
        assert [list(asked.ids) for asked in engine.asked] == [
            segments(whole.turns[: index + 1])[whole.turns[index].segment][: -len(whole.turns[index].ids)]
            for index in range(logged_turns, len(whole.turns))
        ], "the engine is asked with exactly the recorded context"


async def test_a_capped_turn_is_the_whole_turn_with_its_stop_written_for_it(format: Renderer, made: Made) -> None:
    look = format.turn([("read_file", {"path": made.path})])
    finish = format.turn([("finish", {})], before=1)
    ids: list[list[int]] = []
    for first in (look, look[:-1]):
        episode = await run_episode(
            engine=Played([first, finish], format.stop_ids),
            sandbox=LocalFiles(made.task.files),
            renderer=format,
            request=wanted(made.task.ref, LARGE),
            task=made.task,
        )
        assert [call.error for call in episode.turns[0].calls] == [""]
        ids.append(segments(episode.turns)[0])
    assert ids[0] == ids[1]
