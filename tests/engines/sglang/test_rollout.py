"""The rollout actor with a server as its engine: the same trajectories over staged versions, by configuration."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.policies import Policies
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run
from headrace.config import Engine as EngineSection
from headrace.config import Environment as Section
from headrace.engines.base import UnusableEngine
from headrace.messages.rollout import TurnSampled
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import EVENT, TURN
from headrace.policy import routes
from headrace.policy.layout import hugging_face
from headrace.weights import tensor_state
from tests.actors.rollout.test_policies import end_of, issue
from tests.conftest import Connect
from tests.support import tiny
from tests.support.actors import living
from tests.support.sglang.double import Double
from tests.support.staged import SHAPE, first, prepare, stage, swapped

pytestmark = pytest.mark.anyio

POLICY = hugging_face.from_section(SHAPE)


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    one = Double(POLICY)
    one.info = {"context_length": 8192}
    await one.start()
    yield one
    await one.close()


def section(double: Double, folder: Path) -> EngineSection:
    return EngineSection(kind="sglang", exact=False, options={"url": double.url})


def config(folder: Path, engine: EngineSection) -> Config:
    return Config(
        run=Run(dir=str(folder)),
        policy=SHAPE,
        engine=engine,
        environment=Section(backend="process", lease_s=20.0),
        production=Production(enabled=False),
    )


async def test_a_rollout_actor_follows_staged_versions_on_a_server(
    connect: Connect, double: Double, tmp_path: Path
) -> None:
    files = {}
    for version in (0, 1):
        file = tmp_path / f"{version}.safetensors"
        files[version] = (str(file), tensor_state.write(file, tiny.model(POLICY, exact=False, seed=version).state()))
    observer = await connect("admin")
    settings = config(tmp_path, section(double, tmp_path))
    await prepare(connect, "s1")
    await stage(observer, "s1", "here", 0, *files[0])
    swaps = EVENT.where(run="s1", type="weights_swapped")
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Rollout, settings, await connect("rollout", node="here"), "s1", "roll"),
    ):
        await issue(observer, "s1", "g1")
        end = await end_of(observer, "s1", "g1")
        assert {span.version for turn in end.turns for span in turn.spans} == {0}
        assert end.fingerprint.startswith("sglang-")
        assert end.turns_from and all(turn.routed is None for turn in end.turns), "the turn log has the routes"
        logged = [each.message async for each in observer.history("HR_TURN", TURN.at(run="s1", trajectory=end.id))]
        turns = [routes.in_memory(record.turn) for record in logged if isinstance(record, TurnSampled)]
        assert len(turns) == len(end.turns)
        assert all(turn.routed is not None and turn.routed.dtype == "|u1" for turn in turns)
        await stage(observer, "s1", "here", 1, *files[1])
        told = await first(observer, "HR_EVENT", swaps, swapped(1))
        assert told.state_hash == files[1][1] and told.pause_ms > 0
        await issue(observer, "s1", "g2")
        assert (await end_of(observer, "s1", "g2")).oldest_version == 1
    assert not (tmp_path / "headrace-s1-roll").exists()


@pytest.mark.parametrize(
    ("changes", "lacking", "words"),
    [
        ({"exact": True}, "", "engine.exact: expected false"),
        ({}, "/update_weights_from_disk", r"the server \(SGLang 0.5.23\) cannot be used: "),
        ({"options": {}}, "", "engine.options: expected either url"),
        ({"options": {"url": 3}}, "", "engine.options: engines 'sglang': Expected `str`"),
        ({"options": {"adress": "x"}}, "", "engine.options.adress: engines 'sglang' has no such option"),
    ],
)
async def test_an_actor_that_cannot_have_its_engine_gives_up_with_a_sentence(
    connect: Connect, double: Double, tmp_path: Path, changes: dict[str, object], lacking: str, words: str
) -> None:
    double.openapi["paths"].pop(lacking, None)
    settings = config(tmp_path, msgspec.structs.replace(section(double, tmp_path), **changes))
    bus: Bus = await connect("rollout", node="here")

    async def ignore(*args: object) -> None:
        return None

    policies = Policies(settings, bus, "s2", "roll", ignore, ignore)
    with pytest.raises(UnusableEngine, match=words):
        await policies._open_engine()
    await policies.stop()
