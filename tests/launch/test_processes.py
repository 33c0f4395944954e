"""Which processes a run starts: without a model there is no search actor, and its tasks do not offer its tool."""

import asyncio
from pathlib import Path

import pytest

from headrace.config import Config, Metrics, Processes, Search, Weights, branch_name, versions
from headrace.launch import runs
from headrace.launch.processes import Run, process_groups
from headrace.launch.supervision.exporters import Exporters
from headrace.launch.supervision.signals import Stopping
from headrace.search import models
from headrace.search.models import offers_search


def test_the_search_actor_is_started_where_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Config(search=Search(model="some/folder"))
    assert ("search",) in process_groups(named) and offers_search(named)
    none = Config(search=Search(model="none"))
    assert ("search",) not in process_groups(none) and not offers_search(none)
    assert len(process_groups(none)) == len(process_groups(named)) - 1
    monkeypatch.setattr(models, "packaged", lambda: None)
    assert ("search",) not in process_groups(Config()) and not offers_search(Config())


def test_a_run_without_the_actor_does_not_offer_its_tool() -> None:
    groups = tuple(group for group in Processes().groups if group != ("search",))
    assert not offers_search(Config(search=Search(model="some/folder"), processes=Processes(groups=groups)))


@pytest.mark.anyio
async def test_a_run_whose_processes_cannot_be_started_ends_with_a_sentence(tmp_path: Path) -> None:
    folder = runs.create(tmp_path, "r1")
    (folder.logs / "curriculum.log").mkdir()
    run = Run(Config(processes=Processes(groups=(("curriculum",),))), folder, folder.config, Stopping())
    with pytest.raises(
        runs.RunError, match=r"^curriculum could not be started: its log .* \(Is a directory\)$"
    ) as failed:
        await run.start()
    assert failed.value.exit_status == 3
    await run.close()


@pytest.mark.anyio
async def test_exporters_that_cannot_be_started_end_no_run(tmp_path: Path) -> None:
    folder = runs.create(tmp_path, "r1")
    (folder.logs / "exporters.log").mkdir()
    exporters = Exporters(Config(metrics=Metrics(tensorboard=str(tmp_path))), folder)
    said: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(exporters.watch(said.put_nowait))
    assert "exporters could not be started: its log" in await said.get()
    await watching
    await exporters.stop(finished=False)


@pytest.mark.anyio
async def test_the_end_of_a_run_gives_back_the_memory_of_its_versions_alone(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    config = Config(processes=Processes(groups=()), weights=Weights(memory_dir=str(memory)))
    folder = runs.create(tmp_path / "runs", "r1")
    for run in ("r1", branch_name("r1", config.feedback), "r10"):
        file = versions.folder(config, run) / "snapshots" / "v00000001.safetensors"
        file.parent.mkdir(parents=True)
        file.touch()
    await Run(config, folder, folder.config, Stopping()).close()
    assert [each.name for each in memory.iterdir()] == ["headrace-r10"]
