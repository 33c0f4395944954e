"""A stream that fills up on a real broker is above the alert's threshold, and no other one is."""

import asyncio
import os
import re
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.config import Config, parse
from headrace.dashboard.run_metrics import RunMetrics
from headrace.dashboard.watch import Watch
from headrace.messages import subjects as s
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightChunk
from tests.support import records
from tests.support.keys import as_writers
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
PLANNED = 1 << 20
_RULE = re.compile(r"alert: StreamAlmostFull\s+expr: '(\w+) / (\w+) > ([\d.]+)'")


def alarmed(metrics: RunMetrics) -> set[str]:
    """The streams for which the alert's own expression holds, by what Prometheus reads."""
    rule = _RULE.search((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert rule is not None
    values: dict[str, dict[str, float]] = {rule[1]: {}, rule[2]: {}}
    for family in metrics.collect():
        for sample in family.samples:
            if sample.name in values:
                values[sample.name][sample.labels["stream"]] = sample.value
    above = {name for name, size in values[rule[1]].items() if size / values[rule[2]][name] > float(rule[3])}
    assert float(rule[3]) == 0.8
    return above


async def test_the_alarm_comes_at_four_fifths_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = tuple(
        msgspec.structs.replace(stream, max_bytes=PLANNED) if stream.name == "HR_STEP" else stream
        for stream in s.STREAMS
    )
    monkeypatch.setattr("headrace.bus.nats.streams.STREAMS", streams)
    monkeypatch.setattr(s, "STREAM", {stream.name: stream for stream in streams})
    run = f"r{token_hex(4)}"
    async with Server(tmp_path) as server:
        async with await as_writers(server.url, server.credentials) as bus:
            await declare(bus)
            metrics = RunMetrics(Watch(bus, run, Config(), 0.0), bus, tmp_path)

            async def fill(share: float) -> None:
                """Store records until the stream has this share of its planned size, then read the figures once."""
                while True:
                    answer = msgspec.json.decode(await bus.connection.api("STREAM.INFO.HR_STEP"))
                    if answer["state"]["bytes"] > share * PLANNED:
                        break
                    refused = records.step_failed(0, (), 0, run=run)
                    detail = os.urandom(10_000).hex()
                    await bus.publish(s.STEP.at(run=run), msgspec.structs.replace(refused, detail=detail))
                await metrics.read_streams()

            async with asyncio.timeout(PATIENCE_S):
                await fill(0.7)
                assert alarmed(metrics) == set()
                await fill(0.8)
                assert alarmed(metrics) == {"HR_STEP"}


async def test_the_plan_of_the_weights_follows_the_model_and_the_broker_s_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = tuple(
        msgspec.structs.replace(stream, max_bytes=PLANNED) if stream.name == "HR_WEIGHTS" else stream
        for stream in s.STREAMS
    )
    monkeypatch.setattr(s, "STREAM", {stream.name: stream for stream in streams})
    run, config = f"r{token_hex(4)}", parse("[weights]\ncollect_chains = 2\n")
    async with Server(tmp_path) as server:
        async with await as_writers(server.url, server.credentials) as bus:
            await declare(bus)
            stored = 0

            async def fill(size: int) -> None:
                nonlocal stored
                while stored < size:
                    stored += 500_000
                    chunk = WeightChunk(run=run, version=0, shard=0, seq=stored, data=os.urandom(500_000))
                    await bus.publish(s.WEIGHT_CHUNK.at(run=run, version=0, shard=0, seq=stored), chunk)

            ready = SnapshotReady(run=run, version=0, path="v", state_hash="h", bytes=5 << 20)
            await bus.publish(s.EVENT.at(run=run, actor="trainer", type="snapshot_ready"), ready)
            metrics = RunMetrics(Watch(bus, run, config, 0.0), bus, tmp_path)
            await fill(int(0.9 * PLANNED))
            await metrics.read_streams()
            assert alarmed(metrics) == set(), (
                "the run keeps the deltas of three chains, a quarter of five mebibytes each"
            )
            await fill(int(0.9 * 3 * 1.25 * (1 << 20)))
            await metrics.read_streams()
            assert alarmed(metrics) == {"HR_WEIGHTS"}
            await declare(bus, sizes={"HR_WEIGHTS": 8 << 20})
            await metrics.read_streams()
            assert alarmed(metrics) == set(), "the broker's own limit counts where there is one"
