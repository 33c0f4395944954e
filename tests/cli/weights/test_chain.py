"""`headrace weights log` on the store of a finished run: a broker is opened, everything is read from the streams."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.bus.broker import credentials, keys
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.cli import main
from headrace.launch import runs
from headrace.weights import snapshot
from tests.support.chains import Run
from tests.support.keys import as_writers
from tests.support.object_folder import ObjectFolder
from tests.support.weights import model

LOG = ("weights", "log")
EXPORT = ("export", "r1", "--as", "safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A folder with one run of five versions, a full snapshot beside the third; its broker is down."""
    root = tmp_path_factory.mktemp("root")
    folder = runs.create(root / "runs", "r1")

    async def publish() -> Run:
        async with Server(folder.broker) as server:
            async with await as_writers(server.url, server.credentials) as admin:
                await declare(admin)
            key = keys.load(server.credentials, credentials.PUBLISHER)
            async with await Bus.connect(server.url, role="weight_sync", credentials=server.credentials) as bus:
                run = Run(bus, root / "trainer", signer=key)
                run.id, run.wide = "r1", 1000
                run.objects = ObjectFolder(folder.path / "full_snapshots")
                for version in range(5):
                    await run.publish(version)
                    if version in (1, 3):
                        await run.full()
        return run

    return root, asyncio.run(publish())


def said(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main.main(args) == code
    out = capsys.readouterr()
    return out.err if code else out.out


def test_the_commands(
    finished: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, run = finished
    monkeypatch.chdir(root)
    assert len(said(capsys, *LOG).splitlines()) == 6
    shown = said(capsys, *LOG, "--version", "2")
    assert run.heads[2].state_hash in shown and run.heads[2].signer in shown
    holds = said(capsys, *LOG, "--verify")
    assert "versions 0 to 4, 5 built and hashed, 2 full snapshots beside them" in holds and "all signed" in holds
    assert run.heads[1].state_hash in said(capsys, *LOG, "--verify", "--version", "1")
    assert "never committed version 9" in said(capsys, *LOG, "--verify", "--version", "9", code=1)
    said(capsys, *EXPORT, "out.safetensors", "--version", "3")
    assert snapshot.file_hash("out.safetensors") == run.heads[3].state_hash
    assert "exists already" in said(capsys, *EXPORT, "out.safetensors", code=2)
    differ = said(capsys, *LOG, "--version", "3", "--since", "1")
    assert "version 1 to version 3" in differ and "embed" in differ and "d10-zstd" in differ
    assert "expected an integer >= 2" in said(capsys, *LOG, "--collect", "1", code=2)
    assert "--since compares two versions" in said(capsys, *LOG, "--since", "1", code=2)
    assert "removed 1 versions, 0 to 0, and" in said(capsys, *LOG, "--collect", "2")
    assert "collected" in said(capsys, *LOG)
    assert "older versions are collected" in said(capsys, *LOG, "--verify")
    (root / "runs/r1/broker/credentials/weight_publisher.nk").unlink()
    (root / "runs/r1/broker/credentials/weight_publisher.pub").unlink()
    # The broker's start makes a new key, which signed nothing here.
    assert "not among [weights] publishers" in said(capsys, *LOG, "--verify", code=1)


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A folder with one run whose full snapshots are objects: versions 0 to 5, the state hash of each."""
    from headrace.actors.weight_sender import WeightSender
    from tests.support.weight_runs import WeightRun

    root = tmp_path_factory.mktemp("detached")
    folder = runs.create(root / "runs", "r1")

    async def publish() -> dict[int, str]:
        async with Server(folder.broker) as server:
            async with await as_writers(server.url, server.credentials) as admin:
                await declare(admin)
            buses: list[Bus] = []

            async def connect(role: str = "admin", **options: Any) -> Bus:
                buses.append(await Bus.connect(server.url, role=role, credentials=server.credentials, **options))
                return buses[-1]

            run = WeightRun(connect, root / "runs", anchor_every=2)
            run.id, run.tensors = "r1", model(wide=1000)
            await run.open()
            await run.actor(WeightSender)
            for version in range(6):
                await run.train(version)
                await run.event("published", f"version {version}")
            await run.close()
            for bus in buses:
                await bus.close()
        return run.hashes

    return root, asyncio.run(publish())


def test_the_commands_find_full_snapshots_that_are_objects(
    detached: tuple[Path, dict[int, str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, hashes = detached
    monkeypatch.chdir(root)
    store = root / "runs/r1/full_snapshots"
    assert "an object at [weights] full_snapshots_url" in said(capsys, *LOG, "--version", "0")
    assert "versions 0 to 5, 6 built and hashed" in said(capsys, *LOG, "--verify")
    assert hashes[3] in said(capsys, *LOG, "--verify", "--version", "3")
    said(capsys, *EXPORT, "out.safetensors", "--version", "3")
    assert snapshot.file_hash("out.safetensors") == hashes[3]
    removed = said(capsys, *LOG, "--collect", "2")
    assert f"removed 1 full snapshots at {store}: 0-" in removed
    assert sorted(path.name.partition("-")[0] for path in store.iterdir()) == ["2", "4"]
    assert "older versions are collected" in said(capsys, *LOG, "--verify")
    next(store.glob("2-*")).unlink()
    text = said(capsys, *EXPORT, "other.safetensors", "--version", "3", code=1)
    assert f"{store} has no 2-" in text
