"""An adapter from a run's traces to its searches and back: learnt and measured, published, used, replayed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.actors.search import Search
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.config import Config
from headrace.harness.tools.search.session import SearchSession, template_of
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import Trajectory
from headrace.messages.search import SearchAdapter, adapter_key
from headrace.messages.subjects import TRAJ
from headrace.search.chunks import PATTERNS
from headrace.search.client import SearchClient
from headrace.search.models import packaged
from headrace.tasks.local import LocalFiles
from tests.support import searched_run
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.searched_run import QUERIES, REPOSITORIES, WORDS, task

RUN, PLAIN = "r-searched", "r-plain"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The broker of the runs."""
    broker = Server(tmp_path_factory.mktemp("searched") / "broker")

    async def begin() -> None:
        await broker.start()
        async with await as_writers(broker.url, broker.credentials) as admin:
            await declare(admin)
            await searched_run.record(admin, RUN)
            await searched_run.record(admin, PLAIN, plain=True)

    uvloop.run(begin())
    yield broker
    uvloop.run(broker.stop())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched_run.model(tmp_path_factory.mktemp("model"))


def folders(root: Path, server: Server, model: Path | str) -> tuple[Config, Path, Path]:
    """The configuration of the runs, and their folders."""
    setting = searched_run.configuration(root, model)
    setting = msgspec.structs.replace(
        setting, bus=msgspec.structs.replace(setting.bus, url=server.url, credentials=str(server.credentials))
    )
    for name in (RUN, PLAIN):
        (root / name).mkdir()
        (root / name / "config.json").write_bytes(msgspec.json.encode(setting))
    return setting, root / RUN, root / PLAIN


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: exit code, standard output and error."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


async def searched(server: Server, setting: Config, slot: int) -> Trajectory:
    """An attempt of the run with one search by its search actor, stored."""
    where = task(REPOSITORIES - 1)
    made = searched_run.attempt(RUN, REPOSITORIES - 1, slot, "zorvex", QUERIES["zorvex"])
    call = made.turns[0].calls[0]
    async with (
        await Bus.connect(server.url, role="search", credentials=server.credentials) as bus,
        await Bus.connect(server.url, role="rollout", credentials=server.credentials) as rollout,
    ):
        async with living(Search, setting, bus, RUN):
            session = SearchSession(SearchClient(rollout, RUN), RUN, template_of(where), PATTERNS)
            box = Toolbox(("semantic_search",), search=session)
            result = await box.run(call, LocalFiles(where.files), where, f"{made.id}/")
        turn = msgspec.structs.replace(made.turns[0], results=(result,))
        made = msgspec.structs.replace(made, turns=(turn,), diff={}, isolation="episode")
        await rollout.publish(TRAJ.at(run=RUN, group=made.group), made)
    return made


async def gone(server: Server, hash: str) -> None:
    async with await as_writers(server.url, server.credentials) as admin:
        await (await admin.kv("HR_ADAPTERS")).delete(adapter_key(RUN, hash))


def test_an_adapter_is_learnt_published_used_and_replayed(
    server: Server, model: Path, tmp_path: Path, command: Command
) -> None:
    setting, run, _ = folders(tmp_path, server, model)
    file = tmp_path / "adapter"
    code, said, error = command("search", "learn", run, "--out", file)
    assert code == 0, error
    figures = json.loads(said)
    assert (figures["repositories"], figures["pairs"]) == (REPOSITORIES / 2, REPOSITORIES / 2 * len(WORDS))
    assert {each["queries"] for each in figures["held_out"]} == {len(WORDS)}, "the failed attempts are not measured"
    assert len(figures["held_out"]) == REPOSITORIES / 2 and figures["low"] > 0.0
    adapter = msgspec.msgpack.decode(file.read_bytes(), type=SearchAdapter)
    none = msgspec.structs.replace(adapter, figures=msgspec.structs.replace(adapter.figures, gain=0.0, low=0.0))
    (tmp_path / "none").write_bytes(msgspec.msgpack.encode(none))
    code, said, error = command("search", "publish", tmp_path / "none", "--run", run)
    assert (code, said) == (1, "") and error.rstrip().endswith("repositories held out: the low end is not above 0")
    assert "gains 0.0 points of R@5 (95 % interval 0.0 to " in error
    before = uvloop.run(searched(server, setting, 20))
    code, said, error = command("search", "publish", file, "--run", run)
    assert code == 0 and f"use adapter {adapter.hash}: " in said, error
    after = uvloop.run(searched(server, setting, 21))
    plain, adapted = (made.turns[0].results[0].retrieved for made in (before, after))
    assert plain is not None and adapted is not None and plain.chunks != adapted.chunks
    assert (plain.model, adapted.model) == (adapter.model, f"{adapter.model}+{adapter.hash}")

    replayed = ("replay", run, "--trajectory", after.id)
    assert command("search", "withdraw", run)[0] == 0
    code, said, error = command(*replayed)
    assert code == 0 and json.loads(said)["calls"] == 1, said + error  # a withdrawn version is read, too
    code, _, error = command("search", "withdraw", run)
    assert (code, "has no adapter in use" in error) == (1, True)
    uvloop.run(gone(server, adapter.hash))
    code, _, error = command(*replayed)
    assert code == 1 and f"adapter {adapter.hash} is not on the bus of run {RUN} any more" in error


@pytest.mark.slow
def test_without_a_gain_no_adapter_is_published(server: Server, model: Path, tmp_path: Path, command: Command) -> None:
    _, run, plain = folders(tmp_path, server, model)
    file = tmp_path / "adapter"
    code, said, error = command("search", "learn", plain, "--out", file)
    assert code == 0, error
    assert json.loads(said)["low"] <= 0.0
    assert command("search", "publish", file, "--run", run)[0] == 1
    assert command("search", "learn", plain, "--out", file)[0] == 2, "the file exists"
    code, _, error = command("search", "publish", run / "config.json", "--run", run)
    assert code == 2 and "expected a file of `headrace search learn`" in error


@pytest.mark.slow
@pytest.mark.skipif(packaged() is None, reason="the package of the embedding model is not installed")
def test_the_packaged_model_gains_too(server: Server, tmp_path: Path, command: Command) -> None:
    _, run, _ = folders(tmp_path, server, "auto")
    code, said, error = command("search", "learn", run, "--out", tmp_path / "adapter")
    assert code == 0, error
    assert json.loads(said)["low"] > 0.1
