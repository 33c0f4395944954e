"""Child agents: their turns are the attempt's, in any resumption, in a replay and in training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import UNSET

from headrace.engines.base import Sampler
from headrace.harness.loop import Episode, run_episode
from headrace.harness.rendered import differing
from headrace.harness.tools.registry import schemas_of
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, ToolCall, Turn
from headrace.policy import scoring
from headrace.rendering import schemas
from headrace.rendering.base import Parsed, Renderer
from headrace.rendering.registry import Renderers
from headrace.rendering.terse import TerseRenderer
from headrace.replay.calls import in_order
from headrace.tasks.generated.repositories import TOOLS, Made, make
from headrace.tasks.local import LocalFiles
from tests.harness.conftest import Played
from tests.support import chat_formats, tiny
from tests.support.engines import Versions
from tests.support.segments import segments_of
from tests.training.batches.test_batch import trajectory

pytestmark = pytest.mark.anyio
NAMES = (*TOOLS, "delegate")
LIMITS = Limits(context_tokens=100_000, max_tokens=100_000, max_turns=20)


@pytest.fixture
def made() -> Made:
    return make("train", 1_000_003)


def format() -> Renderer:
    tools = schemas_of(NAMES)
    return Renderers(chat_formats.bundle("hermes", tools=schemas.functions_json(tools))).open(tools)


@pytest.fixture
def episode(request_for: Callable[..., RolloutRequest], made: Made) -> Callable[..., Any]:
    async def run(
        engine: Sampler,
        renderer: Renderer,
        limits: Limits = LIMITS,
        resume: Sequence[Turn] = (),
        most: int = 10_000,
        files: dict[str, bytes] | None = None,
    ) -> tuple[Episode, LocalFiles]:
        sandbox = LocalFiles(files or made.task.files)
        task = msgspec.structs.replace(made.task, tools=NAMES)
        asked = request_for(task.ref, limits, Sampling(max_turn_tokens=most))
        done = await run_episode(
            engine=engine, sandbox=sandbox, renderer=renderer, request=asked, task=task, resume=resume
        )
        return done, sandbox

    return run


def play(renderer: Renderer, made: Made) -> list[list[int]]:
    """The child reads, asks for a child of its own, edits and reports; its caller ends."""
    edit = {"path": made.path, "lines": str(made.line), "text": made.fixed}
    calls: list[list[tuple[str, dict[str, str]]]] = [
        [("delegate", {"text": "mend it", "turns": "5"})],
        [("read_file", {"path": made.path})],
        [("delegate", {"text": "you do it"})],
        [("edit_file", edit)],
        [("finish", {"message": "line mended"})],
        [("read_file", {"path": made.path})],
        [("finish", {})],
    ]
    return [renderer.turn(turn) for turn in calls]


async def test_a_child_works_in_the_workspace_and_its_report_returns(episode: Callable[..., Any], made: Made) -> None:
    turns = play(format(), made)
    engine = Played(turns, format().stop_ids)
    whole, sandbox = await episode(engine, format())
    assert whole.outcome == "finished" and sandbox.files[made.path] == made.oracle.solution[made.path]
    assert [turn.caller for turn in whole.turns] == [UNSET, *["0.0"] * 4, UNSET, UNSET]
    assert [turn.segment for turn in whole.turns] == [0, 1, 1, 1, 1, 0, 0]
    assert [turn.index for turn in whole.turns] == [*range(7)]
    (told,) = whole.turns[0].results
    assert told.ok and told.output == "line mended\n[finished: 4 turns]"
    (refused,) = whole.turns[2].results
    assert not refused.ok, "a child has no children"
    renderer = format()
    read = [renderer.tokenizer.decode([int(id) for id in turn.prompt_ids.tolist()]) for turn in whole.turns]
    assert "mend it" in read[1] and made.task.prompt not in read[1], "the child reads the call's text alone"
    assert "line mended" in read[5] and "line mended" not in "".join(read[:5])
    assert sorted(engine.closed) == ["g000001-0-0/0", "g000001-0-0/1"]
    assert differing(whole.turns, made.task.prompt, format(), 6, system=made.task.system) == ()
    ran = [call.id for _, call, _ in in_order(whole.turns)]
    assert ran == ["1.0", "2.0", "3.0", "4.0", "0.0", "5.0", "6.0"], "a call ends after the calls of its child"


async def test_an_attempt_resumes_at_every_record(episode: Callable[..., Any], made: Made) -> None:
    turns = play(format(), made)
    whole, after = await episode(Played(turns, format().stop_ids), format())
    for count in range(1, len(turns)):
        files = after.files if count > 3 else made.task.files  # turn 3 edits
        logged = [*whole.turns[:count]]
        if count <= 4:  # the caller's call has no answer until its child has ended
            logged[0] = msgspec.structs.replace(logged[0], results=())
        again, _ = await episode(Played(turns[count:], format().stop_ids), format(), resume=logged, files=files)
        assert again.outcome == "finished" and len(again.turns) == len(whole.turns)
        for one, other in zip(whole.turns, again.turns, strict=True):
            assert (one.ids, one.prompt_ids, one.segment, one.caller) == (
                other.ids, other.prompt_ids, other.segment, other.caller
            )  # fmt: skip


async def test_a_child_ends_at_its_budget_and_at_the_attempts(episode: Callable[..., Any], made: Made) -> None:
    renderer = format()
    look = renderer.turn([("read_file", {"path": made.path})])
    call, end = renderer.turn([("delegate", {"text": "x", "turns": "2"})]), renderer.turn([("finish", {})])
    two, _ = await episode(Played([call, look, look, end], renderer.stop_ids), format())
    assert "[max_turns: 2 turns]" in two.turns[0].results[0].output and not two.turns[0].results[0].ok
    limits = msgspec.structs.replace(LIMITS, max_turns=2)
    one, _ = await episode(Played([call, look], renderer.stop_ids), format(), limits)
    assert one.outcome == "max_turns" and "[max_turns: 1 turns]" in one.turns[0].results[0].output
    limits = msgspec.structs.replace(LIMITS, max_tokens=len(call) + 2 * len(look))
    half, _ = await episode(Played([call, look, end], renderer.stop_ids), format(), limits)
    assert "[max_tokens: 1 turns]" in half.turns[0].results[0].output, "half of the tokens that are left"
    assert half.sampled_tokens <= limits.max_tokens


class Scripted(TerseRenderer):
    """Reads given calls out of whatever was sampled."""

    calls: list[ToolCall]

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> Parsed:
        """The next call; the text of a report asks again and gets the last one."""
        return Parsed(calls=(self.calls.pop(0) if len(self.calls) > 1 else self.calls[0],))


async def test_the_tokens_of_a_child_score_as_they_were_sampled(
    episode: Callable[..., Any], renderer: TerseRenderer, made: Made, tmp_path: Path
) -> None:
    """Exact mode: both agents' tokens, whose segments alternate, have |dlp| 0."""
    versions = Versions(msgspec.structs.replace(tiny.config(), vocab=640), tmp_path)
    engine = versions.engine()
    await versions.load(engine, 0)
    scripted = Scripted(renderer.tokenizer)
    words = [
        ("delegate", {"text": "x"}), ("read_file", {"path": made.path}), ("finish", {}), ("finish", {}),
        ("read_file", {"path": made.path}), ("finish", {}),
    ]  # fmt: skip
    scripted.calls = [ToolCall(id="", name=name, arguments=arguments) for name, arguments in words]
    limits = msgspec.structs.replace(LIMITS, context_tokens=2000)
    done, _ = await episode(engine, scripted, limits, most=6)
    await engine.stop()
    assert [turn.segment for turn in done.turns] == [0, 1, 1, 0, 0]
    built = segments_of(trajectory(*done.turns))
    assert len(built) == 2 and sum(len(each.targets) for each in built) == done.sampled_tokens
    for each in built:
        ids = torch.cat([each.ids, each.targets[-1:]])
        scored = scoring.score({0: versions.model(0)}, ids, each.spans, (each.positions + 1).tolist(), 1.0)
        assert torch.equal(scored, each.behaviour), "Law 5"
