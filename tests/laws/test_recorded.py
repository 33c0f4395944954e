"""A run that an earlier headrace recorded still audits, replays and verifies.

`recorded/run.tar.xz` holds five steps of the process backend, recorded at commit d2a1f38: streams, full snapshots, two
checkpoints, tokenizer and renderer, and the public keys of its writers and its publisher. `recorded/audit.json` is the
line that `headrace audit` printed then. Message classes and fields may be renamed as long as these tests pass.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from benchmarks import recorded_deltas, weight_delta
from headrace.bus.broker import credentials
from headrace.bus.broker.credentials import WRITERS
from headrace.bus.broker.server import Server, open_store
from headrace.bus.connection import Bus
from headrace.cli.weights import snapshots_of
from headrace.config import Config, load
from headrace.launch.runs import RunDir
from headrace.replay.audit import audit
from headrace.replay.recorded_run import of_run
from headrace.replay.step import StepReplay, replay_steps
from headrace.tasks.packages.fetch import unpack
from headrace.weights import chain, report
from headrace.weights.signing import Trust

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).with_name("recorded")
RUN = "recorded"
STEPS = range(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked run. It has public keys alone: the broker makes new seeds."""
    return unpack(RECORDED / "run.tar.xz", tmp_path_factory.mktemp("recorded") / "unpacked")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Server]:
    """A broker on the recorded streams."""
    server = uvloop.run(open_store(folder / "broker"))
    credentials.trust(server.credentials, folder / WRITERS)
    yield server
    uvloop.run(server.stop())


async def connect(store: Server) -> Bus:
    return await Bus.connect(store.url, role="operator", credentials=store.credentials)


async def test_the_audit_prints_the_recorded_line(store: Server) -> None:
    async with await connect(store) as bus:
        balance = await audit(bus, RUN)
    recorded = json.loads((RECORDED / "audit.json").read_text())
    line = json.loads(msgspec.json.encode(balance))
    assert {name: line[name] for name in recorded} == recorded  # later versions may add fields
    assert balance.balanced and balance.trained == 20


async def replays(store: Server, config: Config, folder: Path) -> list[StepReplay]:
    async with await connect(store) as bus:
        run = await of_run(bus, config, folder, RUN)
        return [line async for line in replay_steps(run, STEPS)]


async def test_every_step_replays_to_the_recorded_bits_on_the_recorded_numerics(store: Server, folder: Path) -> None:
    lines = await replays(store, load(folder / "config.json"), folder)
    assert [line.step for line in lines] == list(STEPS)
    assert len({line.weights_hash for line in lines}) == len(STEPS)
    for line in lines:  # another processor may round otherwise; then the line must say that the fingerprints differ
        assert line.bitwise_equal or not line.fingerprint_match, line
        assert bool(line.why) == (not line.bitwise_equal)
        assert line.grad_norm > 0.0


async def test_other_numerics_are_reported(store: Server, folder: Path) -> None:
    config = load(folder / "config.json")
    other = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, exact=False))
    lines = await replays(store, other, folder)
    assert not any(line.fingerprint_match for line in lines)


def fetch_of(folder: Path) -> chain.Fetch:
    return snapshots_of(RunDir(folder), load(folder / "config.json").weights).fetch


async def test_the_recorded_chain_verifies_with_its_signatures(store: Server, folder: Path) -> None:
    trust = Trust((folder / "weight_publisher.pub").read_text().split())
    async with await connect(store) as bus:
        holds, text = await report.verify_all(bus, RUN, trust, fetch_of(folder))
    assert holds, text
    assert "versions 0 to 5, 6 built and hashed, 2 full snapshots beside them" in text


async def test_the_recorded_steps_are_measured_in_every_codec(store: Server, folder: Path, tmp_path: Path) -> None:
    trust = Trust((folder / "weight_publisher.pub").read_text().split())
    async with await connect(store) as bus:
        heads = [head async for _, head in chain.heads(bus, RUN)]
        figures = await recorded_deltas.of_versions(bus, heads, trust, tmp_path, weight_delta.ours, 1, fetch_of(folder))
    assert figures["versions"] == 6 and figures["steps_without_change"] == 0
    measured = {key.partition("_")[0] for key in figures if key.endswith("changed_pct")}
    assert measured == {"v1", "v2", "v3", "v4", "v5", "mean"}
    assert figures["v1_d8_zstd_ratio"] > 1.0 and 0.0 < figures["v1_changed_pct"] <= 100.0
    assert not list(tmp_path.glob("[0-4].safetensors"))  # two versions at a time, whatever the length of the run
