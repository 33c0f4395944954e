"""Tasks that need a value after two summaries: only a policy that carries it passes; traces are such episodes."""

import itertools
from pathlib import Path

import msgspec
import pytest

from benchmarks import proof_compaction
from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.actors.trainer import initial_policy
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config, load
from headrace.harness.sync_tools import answer
from headrace.harness.tools.registry import schemas_of
from headrace.judging.rules import VERSION
from headrace.ledger.requests import settings_of
from headrace.messages.rollout import RolloutRequest, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import SCORE, TASK, token
from headrace.messages.tasks import TaskRef
from headrace.registry import admit
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.generated import note_traces, notes
from tests.actors.rollout.test_policies import end_of
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judging import first
from tests.support.paths import ROOT
from tests.support.staged import stage

CONFIG = ROOT / "deploy" / "proof-compaction.toml"
TASKS = 3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(CONFIG, [f"run.dir={tmp_path}", "environment.backend=process", "environment.max_vms=4"])


def test_a_task_follows_from_its_seed_and_the_prompt_does_not_name_the_mark() -> None:
    made = [notes.make("notes", seed) for seed in range(200)]
    assert made == [notes.make("notes", seed) for seed in range(200)]
    assert {each.task.prompt for each in made} == {notes.PROMPT}
    assert not any(f" {mark} " in notes.PROMPT for mark in notes.MARKS)
    for each in made:
        first_line, *log = each.task.files[notes.START].decode().splitlines()
        assert first_line.split() == [
            each.name,
            *(word for mark, value in zip(notes.MARKS, each.values, strict=True) for word in (mark, str(value))),
        ]
        assert each.task.files[each.name].decode().startswith(f"code {each.code}\n") and len(log) == 3
    assert {each.values[notes.KEY] for each in made} == {each.code for each in made} == set(range(notes.VALUES))


def test_the_suites_are_disjoint_and_say_which_ids_they_have() -> None:
    train, held_out = open_suite("generated/notes"), open_suite("generated/notes-heldout")
    assert train.ids()[0] not in held_out.ids() and len(held_out.ids()) >= 500
    with pytest.raises(UnknownSuite, match="generated/notes-heldout has no task '1000000'"):
        held_out.task(train.ids()[0])
    with pytest.raises(UnknownSuite, match="notes-heldout, got 'generated/note'"):
        open_suite("generated/note")


def test_traces_keep_each_value_alike_unless_quality_asks_for_the_right_one(config: Config, tmp_path: Path) -> None:
    bundle = initial_policy.bundle(config, tmp_path)
    renderer = Renderers(bundle).open(schemas_of(notes.TOOLS))
    documents = list(itertools.islice(initial_policy.generated(config, bundle), 3 * 400))
    texts = [renderer.tokenizer.decode(document.ids) for document in documents]
    places = [0] * len(notes.MARKS)
    for begin, end in zip(texts[::3], texts[2::3], strict=True):
        values = [begin.partition(f" {mark} ")[2][0] for mark in notes.MARKS]
        written_value = end.partition("</edit_file>")[0][-1]
        assert written_value in values
        for place, value in enumerate(values):
            places[place] += value == written_value
    # 1/4 + 3/4 x 1/8 = 0.344 of 400, four standard errors
    assert all(0.25 < count / 400 < 0.44 for count in places), places
    right = list(itertools.islice(note_traces.mid_training_texts(1, 1.0, renderer, answer, 0.05), 60))
    for shown, last in zip(right[::3], right[2::3], strict=True):
        marked, edit = (renderer.tokenizer.decode(document.ids) for document in (shown, last))
        assert marked.partition(f" {notes.MARKS[notes.KEY]} ")[2][0] == edit.partition("</edit_file>")[0][-1]
        assert shown.solved and not shown.fault
    for document in documents:
        assert len(document.ids) == len(document.weights) and document.weights[0] == 0.0
        assert document.ids[-1] in renderer.stop_ids and document.weights[-1] == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["keeps", "loses"])
async def test_only_a_policy_that_carries_the_value_passes(
    connect: Connect, config: Config, tmp_path: Path, policy: str
) -> None:
    """Under the limits of the proof, through rollout, environment and judge."""
    run = f"notes-{policy}"
    admit("engines", [f"tests.support.note_keeper:{policy}"])
    run_config = msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine, kind=f"tests.support.note_keeper:{policy}")
    )
    bundle = initial_policy.bundle(run_config, tmp_path / run)
    await renderer_bundles.publish(await connect("trainer"), run, bundle)
    observer, settings = await connect("admin"), settings_of(run_config, 1.0)
    await stage(observer, run, "here", 0, str(tmp_path / "0.safetensors"), "0" * 64)
    async with (
        living(Environment, run_config, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, run_config, await connect("judge"), run),
        living(Rollout, run_config, await connect("rollout", node="here"), run, "roll"),
    ):
        for task in range(TASKS):
            request = RolloutRequest(
                run=run, lane="train", group=f"g{task}", slot=0, attempt=0, seed=1,
                task=TaskRef(run_config.tasks.suite, open_suite(run_config.tasks.suite).ids()[task]),
                sampling=settings.sampling, limits=settings.limits, isolation="group",
            )  # fmt: skip
            await observer.publish(TASK.at(run=run, lane="train", suite=token(run_config.tasks.suite)), request)
        ends = [await end_of(observer, run, f"g{task}") for task in range(TASKS)]
        where = [SCORE.at(run=run, judge=VERSION, group=f"g{task}") for task in range(TASKS)]
        scores = [await first(observer, "HR_SCORE", subject, lambda _: True) for subject in where]
    assert [score.verdict for score in scores] == ["passed" if policy == "keeps" else "failed"] * TASKS
    for end in ends:
        assert [turn.kind for turn in end.turns] == ["act", "summary", "act", "summary", "act"]
        assert [turn.segment for turn in end.turns] == [0, 0, 1, 1, 2]
        check_traces(run_config, end, policy == "keeps")
    tokenizer, keeps = Tokenizer.load(tmp_path / run), policy == "keeps"
    stages = [proof_compaction.stages(end, tokenizer) for end in ends]
    assert stages == [proof_compaction.Stages(chosen=keeps, carried=True, answered=True)] * TASKS


def check_traces(config: Config, end: Trajectory, kept: bool) -> None:
    """The traces of mid-training have the ids that the loop renders and the policy writes."""
    bundle = initial_policy.bundle(config, Path(config.run.dir) / end.run)
    renderer = Renderers(bundle).open(schemas_of(notes.TOOLS))
    made = notes.make("notes", int(end.task.task))
    value = made.values[notes.KEY] if kept else (made.values[notes.KEY] + 1) % notes.VALUES
    wanted = [note_traces.encoded(renderer, segment, 0.05)[0] for segment in note_traces.segments(made, value, answer)]
    rendered: list[list[int]] = [[], [], []]
    for turn in end.turns:
        rendered[turn.segment] += [*turn.prompt_ids.tolist(), *turn.ids.tolist()]
    assert rendered == wanted
