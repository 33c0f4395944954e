"""Which weights serve a request: the rollout actor with a real engine, tiny and untrained."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.curriculum import Curriculum as CurriculumActor
from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import pins, policies
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Curriculum, Evaluation
from headrace.config import Rollout as RolloutSection
from headrace.messages.ledger import Admission, GroupDropped, admission_key
from headrace.messages.operations import Event
from headrace.messages.rollout import (
    Limits,
    PolicyRef,
    RendererRecord,
    RolloutRequest,
    Sampling,
    SlotFailed,
    Trajectory,
    renderer_key,
)
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import CLOSE, EVENT, FAIL, TASK, TRAJ, TURN, token
from headrace.messages.tasks import TaskRef
from headrace.rendering import schemas
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.tokenizer import Tokenizer
from headrace.replay.audit import prove
from headrace.tasks import open_suite
from headrace.tasks.workspace import LIGHT, WORKSPACE
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.staged import config, first, made, prepare, stage, swapped

pytestmark = pytest.mark.anyio


@pytest.fixture
def versions(tmp_path: Path) -> dict[int, tuple[str, str]]:
    """Files and state hashes of three untrained policies."""
    return made(tmp_path)


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    async with living(Environment, config(tmp_path), await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


async def issue(bus: Bus, run: str, group: str, **changes: Any) -> None:
    wanted = RolloutRequest(
        run=run,
        lane="train",
        group=group,
        slot=0,
        attempt=0,
        task=changes.pop("task", TaskRef("generated/train", open_suite("generated/train").ids()[0])),
        seed=7,
        sampling=Sampling(max_turn_tokens=8),
        limits=Limits(max_turns=2, context_tokens=4096),
        **changes,
    )
    await bus.publish(TASK.at(run=run, lane="train", suite=token("generated/train")), wanted)


async def end_of(bus: Bus, run: str, group: str) -> Trajectory:
    end = await first(bus, "HR_TRAJ", TRAJ.at(run=run, group=group), lambda message: True)
    assert isinstance(end, Trajectory)
    return end


async def test_the_newest_staged_version_is_loaded_and_named_in_every_span(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    bundle = await prepare(connect, "b1")
    for version in (0, 1):
        await stage(observer, "b1", "here", version, *versions[version])
    await stage(observer, "b1", "elsewhere", 2, *versions[2])
    swaps = EVENT.where(run="b1", type="weights_swapped")
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b1", "roll"):
        await issue(observer, "b1", "g1")
        end = await end_of(observer, "b1", "g1")
        assert {span.version for turn in end.turns for span in turn.spans} == {1}
        assert end.oldest_version == 1 and end.fingerprint and end.renderer == bundle.sha256
        await stage(observer, "b1", "here", 2, *versions[2])
        told = await first(observer, "HR_EVENT", swaps, swapped(2))
        assert (told.state_hash, told.node, told.rollout) == (versions[2][1], "here", "roll")
        await issue(observer, "b1", "g2")
        assert (await end_of(observer, "b1", "g2")).oldest_version == 2
    loads = [r.message.version async for r in observer.history("HR_EVENT", swaps)]
    assert loads == [1, 2]


async def test_the_train_lane_waits_for_the_version_that_its_requests_ask_for(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    await prepare(connect, "b2")
    await stage(observer, "b2", "here", 0, *versions[0])
    state = await (await connect("curriculum")).kv("HR_ADMISSION")
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b2", "roll") as actor:
        await first(observer, "HR_EVENT", EVENT.where(run="b2", type="weights_swapped"), swapped(0))
        # A request that arrives just before the lane closes is held and not sampled.
        await issue(observer, "b2", "early", min_version=1)
        while not actor._running:
            await asyncio.sleep(0.01)
        await state.put(admission_key("b2"), Admission(run="b2", min_version=1, issued=1, retired=0))
        while not actor._pulls["train"].paused:
            await asyncio.sleep(0.01)
        await issue(observer, "b2", "late", min_version=1)
        assert await observer.last("HR_TURN", TURN.where(run="b2")) is None
        await stage(observer, "b2", "here", 1, *versions[1])
        for group in ("early", "late"):
            assert (await end_of(observer, "b2", group)).oldest_version == 1
    log = [r.message async for r in observer.history("HR_TURN", TURN.where(run="b2"))]
    assert log and all(span.version == 1 for record in log if hasattr(record, "turn") for span in record.turn.spans)


async def test_a_pinned_version_serves_beside_the_latest(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    await prepare(connect, "b3")
    for version in (0, 2):
        await stage(observer, "b3", "here", version, *versions[version])
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b3", "roll"):
        await issue(observer, "b3", "pinned", policy=PolicyRef(kind="pinned", version=0))
        await issue(observer, "b3", "latest")
        ends = await asyncio.gather(end_of(observer, "b3", "pinned"), end_of(observer, "b3", "latest"))
        assert [end.oldest_version for end in ends] == [0, 2]
        # The request waits for a version that is staged only now.
        await issue(observer, "b3", "rebuilt", policy=PolicyRef(kind="pinned", version=1))
        await stage(observer, "b3", "here", 1, *versions[1])
        assert (await end_of(observer, "b3", "rebuilt")).oldest_version == 1


@pytest.mark.parametrize("of", ["", "elsewhere"])
async def test_a_pin_that_this_node_never_gets_fails_its_slot_with_the_reason(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setattr(policies, "STAGED_WITHIN_S", 0.2)
    monkeypatch.setattr(pins, "UNPIN_AFTER_S", 0.0)
    run = f"b7{of}"
    await prepare(connect, run)
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), run, "roll") as rollout:
        await issue(observer, run, "pinned", policy=PolicyRef(kind="pinned", version=9, run=of))
        failed = await first(observer, "HR_LEDGER", FAIL.at(run=run, group="pinned"), lambda message: True)
        assert failed.reason == "no_policy" and failed.detail == "version 9 is not staged on here"
        owner = await rollout._policies._branch(of) if of else rollout._policies
        async with asyncio.timeout(PATIENCE_S):
            while owner.pins.versions or owner.pins._releasing:  # the engine never had it and has nothing to release
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("of", ["", "elsewhere"])
async def test_an_attempt_that_waits_for_a_first_version_fails_with_what_to_look_at(
    connect: Connect,
    environment: Environment,
    tmp_path: Path,
    observer: Bus,
    versions: dict[int, tuple[str, str]],
    of: str,
) -> None:
    run = f"b9{of}"
    owner = f"b9branch{of}" if of else run
    await prepare(connect, run)
    if of:
        await prepare(connect, owner)
    short = msgspec.structs.replace(config(tmp_path), rollout=RolloutSection(wait_s=0.2))
    named = PolicyRef(run=owner if of else "")
    async with living(Rollout, short, await connect("rollout", node="here"), run, "roll"):
        await issue(observer, run, "early", policy=named)
        failed = await first(observer, "HR_LEDGER", FAIL.at(run=run, group="early"), lambda message: True)
        assert failed.reason == "no_policy"
        assert failed.detail.startswith(f"run {owner} has no version on here") and "trainer" in failed.detail
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), run, "roll"):
        await issue(observer, run, "waits", policy=named)
        await stage(observer, owner, "here", 1, *versions[1])
        end = await end_of(observer, run, "waits")
        assert {span.version for turn in end.turns for span in turn.spans} == {1}


async def test_a_group_that_no_environment_serves_is_dropped_and_the_ledger_balances(
    connect: Connect, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    run = "b10"
    await prepare(connect, run)
    await stage(observer, run, "here", 0, *versions[0])
    alone = msgspec.structs.replace(
        config(tmp_path),
        rollout=RolloutSection(node_wait_s=0.3),
        curriculum=Curriculum(group_size=2, groups_per_step=1, staleness=0, steps=1, attempts=2),
        evaluation=Evaluation(heldout_tasks=0, unseen_tasks=0),
    )
    async with (
        living(Rollout, alone, await connect("rollout", node="here"), run, "roll"),
        living(CurriculumActor, alone, await connect("curriculum"), run, "plan"),
    ):
        dropped = await first(observer, "HR_SCORE", CLOSE.where(run=run), lambda m: isinstance(m, GroupDropped))
    assert dropped.reason == "infra"
    failures = [r.message async for r in observer.history("HR_LEDGER", FAIL.at(run=run, group=dropped.group))]
    assert len(failures) == 4 and {failure.reason for failure in failures} == {"no_environment"}
    assert f"headrace actor environment --config TOML --run {run}" in failures[0].detail
    report, wrong = await prove(observer, run)
    assert not wrong and report.dropped == {"infra": 2}


async def test_a_script_serves_tasks_without_solutions_unless_it_is_the_one_that_writes_them(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    """Before, such a request used up its deliveries and ended as a dead letter."""
    workspace = TaskRef(WORKSPACE, LIGHT)
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b11", "roll"):
        await issue(observer, "b11", "solve", task=workspace, policy=PolicyRef("scripted", name="oracle"))
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="b11", group="solve"), lambda message: True)
        assert failed.reason == "no_policy" and "no oracles" in failed.detail
        await issue(observer, "b11", "idle", task=workspace, policy=PolicyRef("scripted", name="idle"))
        assert (await end_of(observer, "b11", "idle")).outcome == "finished"


async def test_a_branch_that_could_not_be_opened_is_opened_for_the_next_request(
    connect: Connect, tmp_path: Path
) -> None:
    async def unheard(*_: object) -> None:
        raise AssertionError

    away = await connect("rollout", node="here")
    branches = policies.Policies(config(tmp_path), away, "b8", "roll", unheard, unheard)
    await away.close()
    with pytest.raises(BusError):
        await branches._branch("b8-branch")
    branches._bus = await connect("rollout", node="here")
    assert (await branches._branch("b8-branch")).version == -1
    await branches.stop()


@pytest.mark.parametrize("version", [0, 1])
async def test_a_version_whose_load_failed_for_now_is_loaded_later(
    connect: Connect, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]], version: int
) -> None:
    """Before, one failure was permanent: the next version never came, because nothing was sampled for it."""
    run = f"b13{version}"
    await prepare(connect, run)
    late, events = tmp_path / "late.safetensors", EVENT.where(run=run, actor="rollout", type="event")
    for older in range(version):
        await stage(observer, run, "here", older, *versions[older])
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), run, "roll") as actor:
        await actor._policies.reached(version - 1)
        await stage(observer, run, "here", version, str(late), versions[version][1])
        failed = await first(observer, "HR_EVENT", events, lambda m: isinstance(m, Event) and m.kind == "load_failed")
        assert "late.safetensors" in failed.text and "tried again in 2 s" in failed.text and failed.level == "warning"
        late.hardlink_to(versions[version][0])
        swaps = EVENT.where(run=run, type="weights_swapped")
        told = await first(observer, "HR_EVENT", swaps, swapped(version))
        assert told.state_hash == versions[version][1]


async def test_a_newer_version_does_not_wait_for_the_next_try_of_an_older_one(
    connect: Connect,
    tmp_path: Path,
    observer: Bus,
    versions: dict[int, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "AGAIN_S", (1e6, 1e6))
    await prepare(connect, "b14")
    await stage(observer, "b14", "here", 0, str(tmp_path / "gone"), versions[0][1])
    events = EVENT.where(run="b14", actor="rollout", type="event")
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b14", "roll"):
        await first(observer, "HR_EVENT", events, lambda m: isinstance(m, Event) and m.kind == "load_failed")
        await stage(observer, "b14", "here", 1, *versions[1])
        await first(observer, "HR_EVENT", EVENT.where(run="b14", type="weights_swapped"), swapped(1))


async def test_a_version_that_is_published_again_with_other_bits_is_served_again(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    """A trainer that repeats a step after a restart may publish its version as a new incarnation. Before, the rollout
    sampled the old bits under the number of the new ones."""
    await prepare(connect, "b15")
    swaps = EVENT.where(run="b15", type="weights_swapped")
    pinned = PolicyRef(kind="pinned", version=1)

    def of(bits: int) -> Any:
        return lambda message: (message.version, message.state_hash) == (1, versions[bits][1])

    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b15", "roll") as actor:
        await stage(observer, "b15", "here", 1, *versions[1])
        await first(observer, "HR_EVENT", swaps, of(1))
        await issue(observer, "b15", "g1", policy=pinned)
        await end_of(observer, "b15", "g1")
        worker = actor._policies.engine._worker  # type: ignore[union-attr]
        assert worker.pinned[1].state_hash == versions[1][1]
        await stage(observer, "b15", "here", 1, *versions[2])
        await first(observer, "HR_EVENT", swaps, of(2))
        await issue(observer, "b15", "g2", policy=pinned)
        await end_of(observer, "b15", "g2")
        assert worker.pinned[1].state_hash == worker.latest.state_hash == versions[2][1]
        await stage(observer, "b15", "here", 1, *versions[2])  # the receiver started again
        await stage(observer, "b15", "here", 2, *versions[0])
        await first(observer, "HR_EVENT", swaps, swapped(2))
    loads = [r.message.state_hash async for r in observer.history("HR_EVENT", swaps)]
    assert loads == [versions[bits][1] for bits in (1, 2, 0)]


async def test_a_staged_path_outside_of_the_runs_is_not_opened(
    connect: Connect, observer: Bus, versions: dict[int, tuple[str, str]], tmp_path: Path
) -> None:
    run, inside = "b12", tmp_path / "runs"
    inside.mkdir()
    path, state_hash = versions[0]
    refused = asyncio.create_task(event_of(observer, run, "load_failed"))
    heard = []
    async with living(Rollout, config(inside), await connect("rollout", node="here"), run, "roll") as actor:
        await stage(observer, run, "here", 0, path, state_hash)
        heard.append((await refused).text)
        assert actor._policies._staged == {} and actor._policies.engine is None
    assert "expected a file .safetensors below" in heard[0] and path in heard[0]


async def event_of(bus: Bus, run: str, kind: str) -> Event:
    async for received in bus.follow("HR_EVENT", EVENT.where(run=run, type="event")):
        if received.message.kind == kind:
            return msgspec.convert(received.message, Event)
    raise AssertionError("the stream ended")


async def test_a_version_with_other_bits_is_never_served(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    await prepare(connect, "b4")
    await stage(observer, "b4", "here", 0, *versions[0])
    await stage(observer, "b4", "here", 1, versions[2][0], versions[1][1])
    events = EVENT.where(run="b4", actor="rollout", type="event")
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b4", "roll"):
        told = await first(observer, "HR_EVENT", events, lambda m: isinstance(m, Event) and m.kind == "load_failed")
        assert told.level == "error" and "not tried again" in told.text
        await issue(observer, "b4", "forged", policy=PolicyRef(kind="pinned", version=1))
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="b4", group="forged"), lambda message: True)
        assert isinstance(failed, SlotFailed) and failed.reason == "engine_error"
        await stage(observer, "b4", "here", 2, *versions[2])
        await issue(observer, "b4", "g1")
        assert (await end_of(observer, "b4", "g1")).oldest_version == 2


async def test_a_node_without_the_runs_bundle_samples_nothing_but_scripts(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, versions: dict[int, tuple[str, str]]
) -> None:
    await stage(observer, "b5", "here", 0, *versions[0])
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), "b5", "roll"):
        await issue(observer, "b5", "none")
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="b5", group="none"), lambda message: True)
        assert failed.reason == "no_policy" and "no renderer bundle" in failed.detail
        idle = PolicyRef(kind="scripted", name="idle")
        await issue(observer, "b5", "script", policy=idle)
        assert (await end_of(observer, "b5", "script")).renderer == ""
        bundle = await prepare(connect, "b5")
        await issue(observer, "b5", "later")
        assert (await end_of(observer, "b5", "later")).renderer == bundle.sha256


@pytest.mark.parametrize("broken", ["hash", "tools"])
async def test_a_node_refuses_a_bundle_that_is_not_the_runs(
    connect: Connect,
    environment: Environment,
    tmp_path: Path,
    observer: Bus,
    versions: dict[int, tuple[str, str]],
    broken: str,
) -> None:
    run = f"b6{broken}"
    await stage(observer, run, "here", 0, *versions[0])
    bundle = terse_bundle(Tokenizer.train((), 256 + len(schemas.tags())).dump())
    other = msgspec.structs.replace(bundle, tools={**bundle.tools, "search": "{}"})
    trainer = await connect("trainer")
    named = bundle.sha256 if broken == "hash" else other.sha256
    record = RendererRecord(run=run, sha256=named, blob=await trainer.put_blob(other))
    await (await trainer.kv("HR_RENDERER")).put(renderer_key(run), record)
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), run, "roll"):
        await issue(observer, run, "g1")
        failed = await first(observer, "HR_LEDGER", FAIL.at(run=run, group="g1"), lambda message: True)
    assert failed.reason == "no_policy"
    assert ("its content is" if broken == "hash" else "tool search differs from the run's") in failed.detail
