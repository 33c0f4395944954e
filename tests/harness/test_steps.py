"""Tasks with steps: one conversation, a prompt for each step, and identical ids after a resume."""

from typing import Any

import msgspec
import pytest

from headrace.harness.loop import run_episode
from headrace.harness.prompt import initial_prompt
from headrace.harness.rendered import differing
from headrace.harness.steps import step_ended
from headrace.messages.rollout import Limits, ToolResult, Turn
from headrace.messages.tasks import Step, Task
from headrace.rendering import schemas
from headrace.rendering.base import Renderer
from headrace.rendering.registry import Renderers
from headrace.rendering.terse import TerseRenderer
from headrace.tasks.generated.repositories import TOOLS, Made, make
from headrace.tasks.local import LocalFiles
from headrace.tasks.sandboxes import begin_step
from tests.harness.conftest import Played
from tests.harness.test_chat_formats import FORMATS, LARGE, edit, segments, wanted
from tests.support import chat_formats

pytestmark = pytest.mark.anyio
SECOND = "Now write the word right to notes.txt."
# A template that refuses a user's message behind the results of tools.
STRICT = """{%- for m in messages %}{%- if m.role == 'user' and not loop.first and loop.previtem.role == 'tool' %}
{{- raise_exception('a turn must follow') }}{% endif %}{% endfor %}"""


@pytest.fixture
def made() -> Made:
    return make("train", 1_000_003)


@pytest.fixture
def task(made: Made) -> Task:
    return msgspec.structs.replace(
        made.task, system="Be brief.", steps=(Step(prompt=SECOND, files={"notes.txt": b"wrong\n"}),)
    )


@pytest.fixture(params=["terse", *FORMATS, "strict"])
def format(request: pytest.FixtureRequest, renderer: TerseRenderer) -> Renderer:
    if request.param == "terse":
        return renderer
    strict = request.param == "strict"
    bundle = chat_formats.bundle("hermes" if strict else request.param)
    if strict:
        bundle = msgspec.structs.replace(bundle, chat_template=STRICT + bundle.chat_template)
    return Renderers(bundle).open([schemas.BY_NAME[name] for name in TOOLS])


def turns_of(format: Renderer, made: Made) -> list[list[int]]:
    note = ("edit_file", {"path": "notes.txt", "lines": "1", "text": "right"})
    return [
        format.turn([edit(made)]),
        format.turn([("finish", {})], before=1),
        format.turn([note], before=2),
        format.turn([("finish", {})], before=3),
    ]


async def test_a_step_follows_the_end_of_the_one_before(format: Renderer, made: Made, task: Task) -> None:
    turns = turns_of(format, made)
    log: list[Turn] = []
    ended: list[tuple[int, dict[str, bytes]]] = []

    async def on_sampled(turn: Turn) -> None:
        log.append(turn)

    async def on_done(index: int, results: tuple[ToolResult, ...]) -> None:
        log[index] = msgspec.structs.replace(log[index], results=results)

    async def play(turns: list[list[int]], resume: list[Turn]) -> tuple[Any, LocalFiles]:
        answered = len(resume) > 1 and bool(resume[1].results)
        sandbox = LocalFiles(task.files | ({"notes.txt": b"wrong\n"} if answered else {}))
        before = len(ended)
        logging: dict[str, Any] = {} if resume else {"on_sampled": on_sampled, "on_done": on_done}

        async def on_step(number: int) -> None:
            ended.append((number, dict(sandbox.files)))
            await begin_step(sandbox, task, number, "t")

        episode = await run_episode(
            engine=Played(turns, format.stop_ids),
            sandbox=sandbox,
            renderer=format,
            request=wanted(task.ref, LARGE),
            task=task,
            on_step=on_step,
            **logging,
            resume=resume,
        )
        assert len(ended) - before == (not answered), "a step that was stored does not end again"
        return episode, sandbox

    whole, sandbox = await play(turns, [])
    assert whole.outcome == "finished" and len(whole.turns) == 4
    assert sandbox.files["notes.txt"] == b"right\n" and ended[0][0] == 1
    assert ended[0][1][made.path] == made.oracle.solution[made.path] and "notes.txt" not in ended[0][1]
    opening = format.tokenizer.decode(whole.turns[2].prompt_ids.tolist())
    assert SECOND in opening and opening.index("done") < opening.index(SECOND)
    assert all(SECOND not in format.tokenizer.decode(whole.turns[index].prompt_ids.tolist()) for index in (0, 1, 3))
    prompt = initial_prompt(wanted(task.ref, LARGE), task)
    assert differing(whole.turns, prompt, format, 6, system=task.system, later=[SECOND]) == ()
    assert differing(whole.turns, prompt, format, 6) == (2,)
    assert [step_ended(whole.turns, turn.calls[0], task) for turn in whole.turns] == [0, 1, 0, 0]
    for logged in (1, 2, 3):
        resumed, _ = await play(turns[logged:], log[:logged])
        assert segments(resumed.turns) == segments(whole.turns)
    open_turn = msgspec.structs.replace(log[1], results=())
    resumed, _ = await play(turns[2:], [log[0], open_turn])
    assert segments(resumed.turns) == segments(whole.turns), "the end of a step that was not stored is repeated"


async def test_a_summary_at_the_end_of_a_step_begins_with_the_next_prompt(
    renderer: TerseRenderer, made: Made, task: Task
) -> None:
    files = task.files | {"notes.txt": b"wrong\n", "log.txt": b"a line of a long log\n" * 40}
    turns = [renderer.turn([("read_file", {"path": "log.txt"})]), *turns_of(renderer, made)]
    common: dict[str, Any] = {"renderer": renderer, "task": task}
    whole = await run_episode(
        engine=Played(turns, renderer.stop_ids),
        sandbox=LocalFiles(files),
        request=wanted(task.ref, LARGE),
        **common,
    )
    filled = sum(len(turn.prompt_ids) + len(turn.ids) for turn in whole.turns[:3]) + len(whole.turns[3].prompt_ids)
    limits = msgspec.structs.replace(LARGE, context_tokens=filled)
    summary = [*renderer.tokenizer.encode("The bug is repaired."), *renderer.stop_ids]
    short = await run_episode(
        engine=Played([*turns[:3], summary, *turns[3:]], renderer.stop_ids),
        sandbox=LocalFiles(files),
        request=wanted(task.ref, limits),
        **common,
    )
    assert [(turn.kind, turn.segment) for turn in short.turns[3:]] == [("summary", 0), ("act", 1), ("act", 1)]
    texts = [renderer.tokenizer.decode([int(id) for id in turn.prompt_ids.tolist()]) for turn in short.turns]
    assert SECOND not in texts[3] and SECOND in texts[4] and "The bug is repaired." in texts[4]
    assert "Be brief." in texts[4] and made.task.prompt not in texts[4]
    prompt = initial_prompt(wanted(task.ref, limits), task)
    assert differing(short.turns, prompt, renderer, 6, system=task.system, later=[SECOND]) == ()


async def test_limits_hold_for_all_steps_together(renderer: TerseRenderer, made: Made, task: Task) -> None:
    turns = turns_of(renderer, made)
    episode = await run_episode(
        engine=Played(turns[:3], renderer.stop_ids),
        sandbox=LocalFiles(task.files),
        renderer=renderer,
        request=wanted(task.ref, Limits(max_turns=3, max_tokens=10_000, context_tokens=10_000)),
        task=task,
    )
    assert episode.outcome == "max_turns" and [turn.finishes for turn in episode.turns] == [False, True, False]
