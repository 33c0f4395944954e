"""Ranks on several machines, here several groups of processes in folders of their own: the versions of the same layout
on one machine, and a rank or a node that dies ends the group, which all nodes join again."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.config import Config
from headrace.messages.training import StepDone, StepManifest
from headrace.python_modules import module_command
from headrace.training.parallel.nodes import meeting
from headrace.weights import snapshot
from tests.actors.trainer.test_ranks import Uneven, alone, assert_near, event, several, supervised
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import RunFeeder, new_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spread(folder: Path, nodes: int, per_node: int = 1, **trainer: Any) -> Config:
    """The configuration of a run on several nodes, which meet at a free port."""
    where = f"127.0.0.1:{free_port()}"
    return several(folder, nodes * per_node, **{"node_ranks": per_node, "rendezvous": where, **trainer})


def overrides(config: Config) -> list[str]:
    """The words of a command line that give the sections which nodes compare."""
    words = []
    for name in meeting.COMPARED:
        section, plain = (msgspec.to_builtins(each) for each in (getattr(config, name), getattr(Config(), name)))
        for key, value in section.items():
            inner = value.items() if isinstance(value, dict) and key == "mesh" else [("", value)]
            for last, each in inner if value != plain[key] else ():
                path = f"{name}.{key}.{last}".removesuffix(".")
                words += ["--set", f"{path}={json.dumps(each) if isinstance(each, bool) else each}"]
    return words


class Node:
    """Another machine: `headrace trainer join` in a folder of its own."""

    def __init__(self, folder: Path, config: Config, number: int, *words: str, starter: tuple[str, ...] = ()) -> None:
        """starter: the program that starts the command."""
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text("")
        self.folder = folder
        self.output = folder.with_suffix(".log")
        with open(self.output, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *starter,
                    *module_command("headrace.cli", "trainer", "join", "run.toml"),
                    *("--node", str(number), *overrides(config), *words),
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )

    def ranks(self) -> list[int]:
        """Its ranks that run."""
        return ranks_of(self.process.pid)

    def text(self) -> str:
        return self.output.read_text()


@contextmanager
def joined(folder: Path, config: Config, *words: str) -> Iterator[list[Node]]:
    """All nodes except the trainer's."""
    nodes = [Node(folder / f"node{n}", config, n, *words) for n in range(1, config.trainer.nodes)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.process.terminate()
            node.process.wait(PATIENCE_S)


async def bits(feeder: RunFeeder, want: list[str]) -> None:
    """The first versions are these, and every step is recorded once, exact."""
    assert [feeder.hashes[number] for number in range(len(want))] == want
    records = await feeder.steps()
    done = [record for record in records if isinstance(record, StepDone)]
    assert [record.step for record in done] == list(range(len(done))), "nothing is trained twice"
    assert all(record.max_abs_dlp == 0.0 and record.exact and record.rescored_tokens for record in done), "Law 5"
    assert all(record.incarnation == 0 for record in records)


@pytest.mark.parametrize(
    ("per_node", "trainer"),
    [(1, {}), (2, {}), (2, {"replicate": 2}), (2, {"expert": 2}), (2, {"replicate": 2, "expert": 2})],
)
async def test_two_nodes_make_the_same_versions_after_a_rank_of_the_other_is_killed(
    connect: Connect, server: Server, tmp_path: Path, per_node: int, trainer: dict[str, Any]
) -> None:
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 4, 2 * per_node, **trainer)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    setting = spread(tmp_path, 2, per_node, **trainer)
    with joined(tmp_path, setting) as (node,):
        async with supervised(setting, server, feeder.run):
            await feeder.batch(0)
            await feeder.version(1)
            assert len(node.ranks()) == per_node and len(ranks_of()) == per_node - 1
            victim = node.ranks()[0]
            os.kill(victim, signal.SIGKILL)
            ended = await event(feeder, "actor_failed")
            assert f"node 1 ({socket.gethostname()}): rank {per_node} (process {victim}) was killed by SIGKILL" in ended
            for number in range(1, 4):
                await feeder.batch(number)
            last = await feeder.version(4)
        assert node.process.poll() is None, "it waits for the next trainer"
    await bits(feeder, want)
    assert snapshot.file_hash(last.path) == last.state_hash
    files = sorted(path.name for path in node.folder.rglob("*") if path.is_file())
    assert files == ["run.toml"], "the other node has no files of the run"
    assert node.text().count("has joined the trainer") == 2
    manifests = [record for record in await feeder.steps() if isinstance(record, StepManifest)]
    layouts = [record.layout for record in manifests]
    copies = trainer.get("replicate", 1)
    assert all(each is not None and (each.ranks, each.nodes) == (2 * per_node, copies) for each in layouts)


async def test_torchrun_starts_a_node(connect: Connect, server: Server, tmp_path: Path) -> None:
    """Its variables MASTER_ADDR and MASTER_PORT name the store of its own agent, and not the trainer."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 2, 2)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    setting = spread(tmp_path, 2)
    torchrun = module_command("torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    node = Node(tmp_path / "node1", setting, 1, "--once", starter=(*torchrun, "--no-python", "--"))
    try:
        async with living(Trainer, setting, await connect("trainer"), feeder.run):
            for number in range(2):
                await feeder.batch(number)
            await feeder.version(2)
        assert await asyncio.to_thread(node.process.wait, PATIENCE_S) == 0, "torchrun ends with the command"
    finally:
        node.process.kill()
        node.process.wait()
    await bits(feeder, want)


async def test_a_machine_that_dies_is_waited_for_and_takes_its_rows_of_the_checkpoint_again(
    connect: Connect, server: Server, tmp_path: Path
) -> None:
    """With a guard, whose copies of the state are rows of the checkpoint too."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 4, 2)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    setting = spread(tmp_path, 2)
    setting = msgspec.structs.replace(setting, algorithm=msgspec.structs.replace(setting.algorithm, guard_k1=100.0))
    with joined(tmp_path, setting) as (node,):
        async with supervised(setting, server, feeder.run):
            for number in range(3):  # there is a checkpoint of version 2
                await feeder.batch(number)
            await feeder.version(3)
            node.process.kill()
            node.process.wait()
            assert "node 1: it has given no sign of life" in await event(feeder, "actor_failed")
            assert "waiting for node 1 of the trainer at" in await event(feeder, "waiting_for_nodes")
            with joined(tmp_path, setting):
                await feeder.batch(3)
                await feeder.version(4)
    await bits(feeder, want)


async def test_resumed_with_other_nodes(connect: Connect, server: Server, tmp_path: Path) -> None:
    """Two nodes, then two ranks of one, then one process, then two nodes: always from the files of node 0."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 8)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    lives = [spread(tmp_path, 2), several(tmp_path, 2), several(tmp_path, 1), spread(tmp_path, 2)]
    for life, setting in enumerate(lives):
        with joined(tmp_path, setting, "--once") as nodes:
            async with living(Trainer, setting, await connect("trainer"), feeder.run):
                for number in (2 * life, 2 * life + 1):
                    await feeder.batch(number)
                last = await feeder.version(2 * life + 2)
            for node in nodes:
                assert node.process.wait(PATIENCE_S) == 0, "the trainer has stopped in order"
    await bits(feeder, want[:1])
    assert_near(last.path, tmp_path / "one", want[8])


async def test_a_trainer_says_which_nodes_it_waits_for_and_stops(connect: Connect, tmp_path: Path) -> None:
    feeder = Uneven(await connect(), new_run(), tmp_path)
    setting = spread(tmp_path, 3)
    actor = Trainer(setting, await connect("trainer"), feeder.run, "t-1")
    await actor.start()
    try:
        says = f"waiting for node 1, 2 of the trainer at {setting.trainer.rendezvous}"
        assert await event(feeder, "waiting_for_nodes") == says and actor.status == says
    finally:
        await actor.shut(1.0)
    await asyncio.to_thread(actor._pool.shutdown)  # its thread has ended, or this waits for ever


async def test_an_address_of_another_machine_is_refused(connect: Connect, tmp_path: Path) -> None:
    feeder = Uneven(await connect(), new_run(), tmp_path)
    actor = Trainer(spread(tmp_path, 2, rendezvous="192.0.2.1:29500"), await connect("trainer"), feeder.run, "t-1")
    await actor.start()
    async with asyncio.timeout(PATIENCE_S):
        error = await actor.failed
    assert "expected an address of this machine, got '192.0.2.1'" in str(error)
    await actor.shut(1.0)
