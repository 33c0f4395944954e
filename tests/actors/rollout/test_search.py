"""An episode that searches: rollout, environment and search actors over a real broker, and the record that remains."""

from pathlib import Path

import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import policies
from headrace.actors.rollout.actor import Rollout
from headrace.actors.search import Search
from headrace.config import Config, Production, Run, Tasks
from headrace.config import Environment as Section
from headrace.config import Search as SearchSection
from headrace.harness.tools.search.session import SearchSession, template_of
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import TASK, TRAJ, token
from headrace.messages.tasks import TaskRef
from headrace.rendering.base import Call
from headrace.search.chunks import PATTERNS
from headrace.search.local import LocalSearcher
from headrace.search.models import read
from headrace.search.service import open_indexes
from headrace.tasks import open_suite
from headrace.tasks.local import LocalFiles
from tests.conftest import Connect
from tests.support import embedding_model
from tests.support.actors import living
from tests.support.judging import first

pytestmark = pytest.mark.anyio
TOOL = "semantic_search"
SCRIPT: list[list[Call]] = [
    [(TOOL, {"query": "the broken function"})],
    [("write_file", {"path": "kit/extra.py", "text": "def broken_function():\n    return 1\n"})],
    [(TOOL, {"query": "the broken function"})],
    [("finish", {})],
]


async def test_a_trajectory_holds_the_evidence_of_its_searches(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = open_suite("generated/train")
    task = suite.task(suite.ids()[0])
    folder = embedding_model.write(tmp_path / "model", [data.decode() for data in task.files.values()])
    config = Config(
        run=Run(dir=str(tmp_path)),
        environment=Section(backend="process", lease_s=20.0, cache_dir=str(tmp_path / "cache")),
        search=SearchSection(model=str(folder), tokens=32, wait_s=100.0),
        production=Production(enabled=False),
        tasks=Tasks(dir=str(tmp_path / "suites"), tools=(TOOL, "write_file")),
    )
    monkeypatch.setattr(policies, "script", lambda name, task, oracle: SCRIPT)
    run, observer = "r-search", await connect("admin")
    request = RolloutRequest(
        run=run,
        lane="train",
        group="g1",
        slot=0,
        attempt=0,
        task=TaskRef("generated/train", suite.ids()[0]),
        seed=7,
        policy=PolicyRef(kind="scripted", name="script"),
        limits=Limits(max_turns=6, max_tokens=20_000, context_tokens=20_000),
    )
    await observer.publish(TASK.at(run=run, lane="train", suite=token("generated/train")), request)

    async with living(Environment, config, await connect("environment", node="n1"), ANY_RUN):
        async with (
            living(Search, config, await connect("search"), run),
            living(Rollout, config, await connect("rollout"), run, "roll-1"),
        ):
            made = await first(
                observer, "HR_TRAJ", TRAJ.at(run=run, group="g1"), lambda found: isinstance(found, Trajectory)
            )
    before, after = made.turns[0].results[0], made.turns[2].results[0]
    assert before.retrieved is not None and after.retrieved is not None
    assert before.retrieved.mode == "hybrid" and before.retrieved.root != after.retrieved.root
    recorded = {"0.0": before.retrieved}
    searcher = LocalSearcher(open_indexes(read(folder), 32, None))
    search = SearchSession(searcher, run, template_of(task), PATTERNS, recorded)
    again = await Toolbox((TOOL,), search=search).run(made.turns[0].calls[0], LocalFiles(task.files), task)
    assert (again.output, again.retrieved) == (before.output, before.retrieved)
