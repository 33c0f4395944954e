"""The agent loop over real repositories: order, limits, resume, summaries, malformed calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.engines.base import EngineError
from headrace.harness.loop import run_episode
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, ToolResult, Turn
from headrace.messages.sandbox import Op, OpResult, ReadFile, ReplaceLines, RunTests, SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.rendering.terse import TerseRenderer
from headrace.tasks.generated.repositories import Made, make
from headrace.tasks.local import LocalFiles

pytestmark = pytest.mark.anyio
Request = Callable[..., RolloutRequest]
Play = Callable[..., Any]


@pytest.fixture
def made() -> Made:
    return make("train", 1_000_003)


@pytest.fixture
def right(made: Made) -> tuple[str, dict[str, str]]:
    return "edit_file", {"path": made.path, "lines": str(made.line), "text": made.fixed}


def context_of(turns: tuple[Turn, ...], segment: int) -> list[int]:
    return [i for t in turns if t.segment == segment for i in (*t.prompt_ids.tolist(), *t.ids.tolist())]


async def test_an_episode_edits_tests_and_finishes(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made, right: Any
) -> None:
    engine = played(
        renderer.turn([("search", {"query": f"def {made.target.name}"}), ("run_tests", {})]),
        renderer.turn([right, ("run_tests", {})]),
        renderer.turn([("finish", {})]),
    )
    sandbox = LocalFiles(made.task.files)
    episode = await run_episode(
        engine=engine, sandbox=sandbox, renderer=renderer, request=request_for(made.task.ref), task=made.task
    )
    assert episode.outcome == "finished" and episode.malformed_calls == 0
    assert sandbox.files[made.path] == made.oracle.solution[made.path]
    first, second, _ = episode.turns
    assert first.results[0].output.startswith(f"{made.path}\n") and "failed" in first.results[1].output
    assert [result.output for result in second.results] == ["ok", "2 passed"]
    assert [call.id for call in second.calls] == ["1.0", "1.1"] == [result.call_id for result in second.results]
    for number, asked in enumerate(engine.asked):
        before = [*context_of(episode.turns[:number], 0), *episode.turns[number].prompt_ids.tolist()]
        assert list(asked.ids) == before, "the context is what was appended and sampled, token for token"
    assert episode.sampled_tokens == sum(len(turn.ids) for turn in episode.turns)
    assert engine.closed == ["g000001-0-0/0"] and {asked.seed for asked in engine.asked} == {5}


class Slow:
    """A real sandbox that holds back calls until released, and notes when each began and ended."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.inner, self.log, self.gates = LocalFiles(files), [], {}  # type: ignore[var-annotated]
        self.inside = self.most = 0

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.log.append(("begin", type(op).__name__))
        if gate := self.gates.get(getattr(op, "path", "")):
            await gate.wait()
        result = await self.inner.call(op, call_id)
        for gate in self.gates.values():
            gate.set()
        self.log.append(("end", type(op).__name__))
        self.inside -= 1
        return result


async def test_calls_of_a_turn_run_together_and_are_answered_in_order(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    sandbox = Slow(made.task.files)
    sandbox.gates["README.md"] = asyncio.Event()  # the first call waits for the second, so they must overlap
    turn = renderer.turn([("read_file", {"path": "README.md"}), ("read_file", {"path": made.path}), ("finish", {})])
    episode = await run_episode(
        engine=played(turn), sandbox=sandbox, renderer=renderer, request=request_for(made.task.ref), task=made.task
    )
    assert sandbox.most == 2
    outputs = [result.output for result in episode.turns[0].results]
    assert outputs[0].startswith("1:# ") and outputs[1].startswith("1:def ") and outputs[2] == "done"


async def test_a_call_that_writes_runs_alone_in_its_place(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made, right: Any
) -> None:
    sandbox = Slow(made.task.files)
    read = ("read_file", {"path": made.path})
    turn = renderer.turn([read, ("run_tests", {}), right, ("run_tests", {}), read, ("finish", {})])
    episode = await run_episode(
        engine=played(turn), sandbox=sandbox, renderer=renderer, request=request_for(made.task.ref), task=made.task
    )
    at = sandbox.log.index(("begin", ReplaceLines.__name__))
    assert sorted(sandbox.log[:at]) == sorted(
        (when, kind.__name__) for when in ("begin", "end") for kind in (ReadFile, RunTests)
    )
    assert sandbox.log[at + 1] == ("end", ReplaceLines.__name__)
    results = [result.output for result in episode.turns[0].results]
    assert "failed" in results[1] and results[3] == "2 passed" and made.fixed in results[4] != results[0]


async def test_malformed_calls_are_answered_and_counted(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    encode, stop = renderer.tokenizer.encode, list(renderer.stop_ids)
    engine = played(
        [*encode('<search/><nothing a="1"/>'), *stop],
        [*encode("I think I am done"), *stop],
        renderer.turn(
            [("terminal", {"command": "rm -rf /"}), ("edit_file", {"path": "x", "lines": "one", "text": ""})]
        ),
        renderer.turn([("read_file", {"path": "no.py"}), ("finish", {})]),
    )
    episode = await run_episode(
        engine=engine,
        sandbox=LocalFiles(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref),
        task=made.task,
    )
    assert episode.malformed_calls == 3 and episode.outcome == "finished"
    answers = [result.output for turn in episode.turns for result in turn.results]
    assert answers[0] == "search: query is missing" and answers[1].startswith("no tool nothing; there are search")
    assert answers[2].startswith("no call; write one such as")
    assert answers[3] == "no tool terminal; there are search, read_file, edit_file, run_tests, finish"
    assert answers[4].startswith("lines must be") and answers[5] == "no.py: No such file or directory"
    assert not any(result.ok for turn in episode.turns[:3] for result in turn.results)
    assert "<error>search: query is missing</error>" in renderer.tokenizer.decode(list(engine.asked[1].ids))


async def test_too_many_calls_in_a_turn(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    limits = Limits(max_parallel_calls=2, max_turns=1)
    turn = renderer.turn([("read_file", {"path": made.path})] * 3)
    episode = await run_episode(
        engine=played(turn),
        sandbox=LocalFiles(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref, limits),
        task=made.task,
    )
    assert [result.ok for result in episode.turns[0].results] == [True, True, False]
    assert episode.turns[0].results[2].output == "more than 2 calls in one turn"
    assert episode.malformed_calls == 1 and episode.outcome == "max_turns"


@pytest.mark.parametrize(
    ("limits", "outcome", "turns"),
    [
        (Limits(max_turns=2), "max_turns", 2),
        (Limits(max_tokens=-1), "max_tokens", 2),  # one turn and a half, however the tokenizer spells it
        (Limits(wall_s=0.0), "wall_time", 0),
        (Limits(context_tokens=5), "context", 0),
    ],
)
async def test_limits_are_outcomes(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made, limits: Limits, outcome: str, turns: int
) -> None:
    look = renderer.turn([("search", {"query": f"def {made.target.name}"})])
    if limits.max_tokens < 0:
        limits = Limits(max_tokens=len(look) * 3 // 2)
    engine = played(*[look] * 5)
    episode = await run_episode(
        engine=engine,
        sandbox=LocalFiles(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref, limits),
        task=made.task,
    )
    assert (episode.outcome, len(episode.turns)) == (outcome, turns)
    assert episode.sampled_tokens <= limits.max_tokens


async def test_a_task_has_a_time_limit_of_its_own(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    look = renderer.turn([("search", {"query": "def"})])
    for time_s, wall_s, outcome in ((1e-9, 600.0, "wall_time"), (600.0, 1e-9, "max_turns")):
        episode = await run_episode(
            engine=played(look),
            sandbox=LocalFiles(made.task.files),
            renderer=renderer,
            request=request_for(made.task.ref, Limits(max_turns=1, wall_s=wall_s)),
            task=msgspec.structs.replace(made.task, limits=SandboxLimits(time_s=time_s)),
        )
        assert episode.outcome == outcome


async def test_a_turn_that_hits_its_cap_is_closed_for_it(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    whole = renderer.turn([("run_tests", {}), ("search", {"query": "something that is long"})])
    engine = played(whole, renderer.turn([("finish", {})]))
    episode = await run_episode(
        engine=engine,
        sandbox=LocalFiles(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref, sampling=Sampling(max_turn_tokens=len(whole) - 3)),
        task=made.task,
    )
    first, second = episode.turns
    assert first.stop == "length" and [bool(call.error) for call in first.calls] == [False, True]
    assert "passed" in first.results[0].output and "not closed" in first.results[1].output
    assert second.prompt_ids.tolist()[0] == renderer.stop_ids[0]
    assert episode.malformed_calls == 1


async def test_a_full_context_becomes_a_summary_and_a_new_segment(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made, right: Any
) -> None:
    look = renderer.turn([("read_file", {"path": made.path})])
    finish = renderer.turn([("finish", {})])
    unlimited = await run_episode(
        engine=played(look, finish),
        sandbox=LocalFiles(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref, Limits()),
        task=made.task,
    )
    # Exactly what the first turn and its result fill.
    limit = len(unlimited.turns[0].prompt_ids) + len(look) + len(unlimited.turns[1].prompt_ids)
    summary = [*renderer.tokenizer.encode(f"the bug is in {made.path}"), *renderer.stop_ids]
    engine = played(look, summary, renderer.turn([right]), finish)
    sandbox = LocalFiles(made.task.files)
    done: list[tuple[int, tuple[ToolResult, ...]]] = []

    async def on_done(index: int, results: tuple[ToolResult, ...]) -> None:
        done.append((index, results))

    episode = await run_episode(
        engine=engine,
        sandbox=sandbox,
        renderer=renderer,
        request=request_for(made.task.ref, Limits(context_tokens=limit)),
        task=made.task,
        on_done=on_done,
    )
    assert [(turn.kind, turn.segment) for turn in episode.turns] == [("act", 0), ("summary", 0), ("act", 1), ("act", 1)]
    assert [index for index, _ in done] == [0, 1, 2, 3]
    asked = renderer.tokenizer.decode(episode.turns[1].prompt_ids.tolist())  # type: ignore[arg-type]
    assert asked.endswith("</result><summary><turn>")
    opening = [int(id) for id in episode.turns[2].prompt_ids.tolist()]
    summary_text = summary[:-1]
    assert any(opening[at : at + len(summary_text)] == summary_text for at in range(len(opening))), "taken over as ids"
    assert renderer.tokenizer.decode(opening).startswith(f"<task>{made.task.prompt}<summary>the bug")
    assert engine.asked[2].session.endswith("/1") and engine.asked[2].seed != engine.asked[1].seed
    assert sorted(engine.closed) == ["g000001-0-0/0", "g000001-0-0/1"]
    assert sandbox.files[made.path] == made.oracle.solution[made.path] and episode.outcome == "finished"


class Recorded:
    """A sandbox that keeps answers by call id, as a real one does."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.inner, self.record, self.ran = LocalFiles(files), {}, []  # type: ignore[var-annotated]

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        if call_id not in self.record:
            self.ran.append(call_id)
            self.record[call_id] = await self.inner.call(op, call_id)
        result: OpResult = self.record[call_id]
        return result


@pytest.mark.parametrize("dies_after", range(6))
async def test_a_resumed_episode_is_the_episode_that_was_never_interrupted(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made, right: Any, dies_after: int
) -> None:
    script = [
        renderer.turn([("search", {"query": f"def {made.target.name}"}), ("run_tests", {})]),
        renderer.turn([right, ("run_tests", {})]),
        renderer.turn([("finish", {})]),
    ]
    request = request_for(made.task.ref)

    class Died(Exception):
        pass

    log: list[Turn] = []
    events = 0

    async def on_sampled(turn: Turn) -> None:
        nonlocal events
        log.append(turn)
        events += 1
        if events > dies_after:
            raise Died

    async def on_done(index: int, results: tuple[ToolResult, ...]) -> None:
        nonlocal events
        events += 1
        if events > dies_after:
            raise Died
        log[index] = msgspec.structs.replace(log[index], results=results)

    sandbox = Recorded(made.task.files)
    common: dict[str, Any] = {"sandbox": sandbox, "renderer": renderer, "request": request, "task": made.task}
    with pytest.raises(Died):
        await run_episode(engine=played(*script), on_sampled=on_sampled, on_done=on_done, **common)
    engine = played(*script[len(log) :])
    episode = await run_episode(engine=engine, resume=log, **common)

    other = Recorded(made.task.files)
    whole = await run_episode(engine=played(*script), **(common | {"sandbox": other}))

    def bare(turns: tuple[Turn, ...]) -> list[Turn]:
        clean = [tuple(msgspec.structs.replace(r, wall_ms=0.0) for r in turn.results) for turn in turns]
        return [msgspec.structs.replace(turn, results=r) for turn, r in zip(turns, clean, strict=True)]

    assert bare(episode.turns) == bare(whole.turns) and episode.outcome == whole.outcome == "finished"
    assert len(engine.asked) == len(script) - len(log), "no turn of the log was sampled again"
    assert sandbox.ran == other.ran, "no operation ran twice"
    assert sandbox.inner.files == other.inner.files


async def test_the_turn_is_written_before_any_call_is_sent(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    order: list[str] = []

    class Watched(LocalFiles):
        async def call(self, op: Op, call_id: str = "") -> OpResult:
            order.append(f"call {call_id}")
            return await super().call(op, call_id)

    async def on_sampled(turn: Turn) -> None:
        await asyncio.sleep(0)
        order.append(f"sampled {turn.index}")

    async def on_done(index: int, results: tuple[ToolResult, ...]) -> None:
        order.append(f"done {index}")

    await run_episode(
        engine=played(renderer.turn([("run_tests", {})]), renderer.turn([("finish", {})])),
        sandbox=Watched(made.task.files),
        renderer=renderer,
        request=request_for(made.task.ref),
        task=made.task,
        on_sampled=on_sampled,
        on_done=on_done,
    )
    assert order == ["sampled 0", "call g000001-0-0/0.0.1", "done 0", "sampled 1", "done 1"]


async def test_infrastructure_is_no_outcome(
    renderer: TerseRenderer, request_for: Request, played: Play, made: Made
) -> None:
    class Lost:
        async def call(self, op: Op, call_id: str = "") -> OpResult:
            raise SandboxLost("the VM died")

    engine = played(renderer.turn([("run_tests", {}), ("run_tests", {})]))
    common: dict[str, Any] = {"renderer": renderer, "request": request_for(made.task.ref), "task": made.task}
    with pytest.raises(SandboxLost, match="the VM died"):
        await run_episode(engine=engine, sandbox=Lost(), **common)
    assert engine.closed == ["g000001-0-0/0"], "the engine forgets the session"

    with pytest.raises(EngineError, match="gave up"):
        await run_episode(engine=played([]), sandbox=LocalFiles({}), **common)


async def test_long_output_is_cut_in_the_middle(renderer: TerseRenderer, request_for: Request, made: Made) -> None:
    from headrace.messages.rollout import ToolCall

    text = "\n".join(f"line {n}" for n in range(1000))
    box = Toolbox(cap=200)
    call = ToolCall(id="0", name="read_file", arguments={"path": "long.txt"})
    result = await box.run(call, LocalFiles({"long.txt": text.encode()}), made.task)
    assert result.truncated and len(result.output) < 260 and "characters cut]" in result.output
    assert result.output.startswith("1:line 0") and result.output.endswith("1000:line 999")
