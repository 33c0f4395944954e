"""A reader in another language, written from docs/wire.md alone, finds the same ledger and the same weights.

Needs node and the packages of package.json: `npm ci` in this folder. Skipped without them.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.actors.weight_sender import WeightSender
from headrace.bus.broker.server import Server
from headrace.messages import subjects as s
from headrace.messages.rollout import RolloutRequest
from headrace.replay.audit import prove
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
NODE = shutil.which("node")


async def read(server: Server, run: str, objects: Path) -> dict[str, Any]:
    """The report of the JavaScript reader about a run. objects: the folder of its full snapshots."""
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        *(NODE, str(HERE / "reader.mjs"), server.url, str(server.credentials / "operator.nk"), run, str(objects)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    output: dict[str, Any] = json.loads(out)
    return output


async def train(connect: Connect, run: str) -> None:
    """A ledger with trained, dropped and open slots: three steps, one group that our own parts failed."""
    config = c.Config(
        curriculum=c.Curriculum(group_size=3, groups_per_step=2, steps=3, attempts=2),
        evaluation=c.Evaluation(before=False, after=False),
    )
    other = FakeWorkers(await connect(), run, groups_per_step=2)

    async def answer(request: RolloutRequest) -> None:
        if request.group == "g000001" or (request.group == "g000003" and request.slot == 0):
            await other.fail(request, "sandbox_lost")
        elif request.group != "g000006":
            await other.solve(request)

    other.answer, other.train = answer, True
    await other.start()
    await other.serve(0)
    async with living(Curriculum, config, await connect("curriculum"), run):
        await other.stepped(2)
    await other.stop()


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(not (HERE / "node_modules").exists(), reason="run `npm ci` in tests/foreign first")
@pytest.mark.parametrize("codec", ["d10-zstd", pytest.param("d8-zstd", marks=pytest.mark.slow)])
async def test_it_recounts_a_run_and_rebuilds_a_version(
    codec: str, server: Server, connect: Connect, tmp_path: Path
) -> None:
    run = await WeightRun(connect, tmp_path, codec=codec, shards=2).open()
    await run.actor(WeightSender)
    for version, density in enumerate((0.0, 0.01, 0.4, 0.02)):
        await run.train(version, density=density)
        await within(PATIENCE_S, run.head(version))
    await train(connect, run.id)
    await run.bus.connection.flush()
    admin = await connect("admin")
    await admin.publish_raw(s.CLOSE.at(run=run.id, group="g1"), b"\xc1", {"Hr-Type": "group_closed/1"})
    report, _ = await prove(run.bus, run.id)
    seen = await read(server, run.id, tmp_path / run.id / "full_snapshots")
    assert (seen["version"], seen["state_hash"]) == (3, run.hashes[3]) and seen["claimed"] == run.hashes[3]
    assert seen["manifests"] > 1 and seen["skipped"] == 1 == report.skipped_count
    ours = {"issued": report.issued, "trained": report.trained, "in_flight": report.in_flight}
    assert {name: seen[name] for name in ours} == ours
    assert seen["dropped"] == sum(report.dropped.values()) > 0 and seen["trained"] > 0
    await run.close()


def test_the_reader_is_short_and_knows_nothing_of_headrace() -> None:
    lines = (HERE / "reader.mjs").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 160 and not any("import" in line and "headrace" in line for line in lines)
    assert msgspec.json.decode((HERE / "package.json").read_bytes())["private"] is True
