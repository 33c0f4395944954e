"""Rights of actors in a region through their own broker, and the limits of a region."""

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from secrets import token_bytes, token_hex

import msgspec
import pytest
from nats.aio.msg import Msg

from headrace.bus.broker import regions
from headrace.bus.broker.permissions import ROLES, of
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, CredentialsRefused, Denied, NoResponders
from headrace.messages.operations import Ack, Event, Heartbeat
from headrace.messages.product import Traffic
from headrace.messages.rollout import TurnDone
from headrace.messages.subjects import EVENT, FAIL, LEDGER, STREAMS, TRAFFIC, TRAJ, TURN
from headrace.messages.weights import WeightHead
from tests.support import records
from tests.support.patience import PATIENCE_S
from tests.support.region_brokers import World, world

pytestmark = pytest.mark.anyio

HEAD = WeightHead(run="", version=0, manifest_seq=1, state_hash="x", full_version=0)


@pytest.fixture(scope="module")
async def brokers(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("regions")) as out:
        await out.join("eu")
        yield out


async def test_events_reads_and_state_go_to_the_hub(brokers: World) -> None:
    here = await brokers.connect("rollout", region="eu")
    there = await brokers.connect("curriculum")
    where = EVENT.at(run="r1", actor="rollout", type="event")
    seq = await here.publish(where, Event(actor="rollout", id="r-1", kind="hello", text="from a region"))
    assert [(r.seq, r.message.text) async for r in there.history("HR_EVENT", where)] == [(seq, "from a region")]
    assert [r.seq async for r in here.history("HR_EVENT", where)] == [seq]
    assert (await here.get("HR_EVENT", seq)).message.kind == "hello"
    beat = Heartbeat(actor="rollout", id="r-1", node="n", pid=1, state="running")
    await (await here.kv("HR_PRESENCE")).put("rollout.r-1", beat)
    entry = await (await there.kv("HR_PRESENCE")).get("rollout.r-1")
    assert entry is not None and entry[0] == beat


async def test_a_consumer_in_a_region_takes_the_hubs_messages(brokers: World) -> None:
    hub = await brokers.connect("admin")
    here = await brokers.connect("rollout", region="eu")
    config = {"durable_name": "d", "name": "d", "ack_policy": "explicit", "filter_subject": "hr.task.r2.>"}
    request = {"stream_name": "HR_TASK", "config": config}
    await here.connection.api("CONSUMER.CREATE.HR_TASK.d.hr.task.r2.>", request)
    await hub.publish("hr.task.r2.train.s", Event(actor="a", id="a", kind="work"))
    got: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def take(message: Msg) -> None:
        got.set_result(message)

    inbox = here.connection.inbox()
    await here.connection.subscribe(f"{inbox}.*", take)
    await here.connection.publish_request("$JS.API.CONSUMER.MSG.NEXT.HR_TASK.d", b'{"batch":1}', f"{inbox}.1")
    async with asyncio.timeout(PATIENCE_S):
        message = await got
    assert message.subject == "hr.task.r2.train.s"
    await here.connection.call(message.reply, b"+ACK")
    info = msgspec.json.decode(await hub.connection.api("CONSUMER.INFO.HR_TASK.d"))
    assert (info["num_ack_pending"], info["ack_floor"]["consumer_seq"]) == (0, 1)


async def test_requests_cross_the_link_both_ways(brokers: World) -> None:
    hub, here = await brokers.connect("environment"), await brokers.connect("environment", region="eu")
    beat = Heartbeat(actor="environment", id="e", node="n", pid=1, state="running")

    async def answer(message: object) -> Heartbeat:
        return beat

    await here.respond("hr.rpc.environment.judge.here.renew", answer)
    await hub.respond("hr.rpc.environment.rollout.there.renew", answer)
    await here.connection.flush()
    await hub.connection.flush()
    asker = await brokers.connect("rollout", region="eu")
    assert await asker.request("hr.rpc.environment.rollout.there.renew", beat) == beat
    asker = await brokers.connect("judge")
    assert await asker.request("hr.rpc.environment.judge.here.renew", beat) == beat


async def test_payloads_over_a_mebibyte_cross_the_link_both_ways(brokers: World) -> None:
    """Their chunks are stored at the hub alone, from where both ends read them."""
    hub, here = await brokers.connect("judge"), await brokers.connect("rollout", region="eu")
    made = records.trajectory(records.issued("g", 0, run="r8"))
    large = msgspec.structs.replace(made, diff={"a.bin": token_bytes(3 << 20)})
    seq = await here.publish(TRAJ.at(run="r8", group="g"), large)
    assert (await hub.get("HR_TRAJ", seq)).message == large
    assert (await here.get("HR_TRAJ", seq)).message == large
    asked, answer = Ack(detail=token_hex(1 << 20)), Ack(detail=token_hex(1 << 20))
    heard: list[object] = []

    async def reply(message: object) -> Ack:
        heard.append(message)
        return answer

    environment = await brokers.connect("environment", region="eu")
    await environment.respond("hr.rpc.environment.judge.large.call", reply)
    await environment.connection.flush()
    assert await hub.request("hr.rpc.environment.judge.large.call", asked, timeout=PATIENCE_S) == answer
    assert heard == [asked]


async def test_a_link_compresses_fast(brokers: World) -> None:
    """The broker's default compresses hardest where the round trip is over 100 ms: text then passes at some MB/s, and
    requests time out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", brokers.regions["eu"].wire.port)
    async with asyncio.timeout(PATIENCE_S):
        word, _, info = (await reader.readline()).partition(b" ")
    writer.close()
    assert (word, msgspec.json.decode(info)["compression"]) == (b"INFO", "s2_fast")
    assert "compression: s2_fast" in (brokers.folder / "eu" / "links.conf").read_text()


async def test_a_turn_is_answered_in_the_region_that_asks(brokers: World) -> None:
    """The scavenger's rule depends on it: a gateway concerns the actors of its own region while one answers there."""
    turn, traffic = "hr.rpc.rollout.gateway.turn-r7", TRAFFIC.at(region="eu")
    actors = {region: await brokers.connect("rollout", region=region) for region in ("", "eu")}

    def answering(region: str) -> Callable[[object], Awaitable[Ack]]:
        async def answer(message: object) -> Ack:
            return Ack(detail=region)

        return answer

    serving = {region: await bus.respond(turn, answering(region), queue="rollout") for region, bus in actors.items()}
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message)

    await (await brokers.connect("scavenger")).listen(traffic, hear)
    for bus in actors.values():
        await bus.connection.flush()

    async def answered(region: str) -> set[str]:
        gateway = await brokers.connect("gateway", region=region)
        answers = [await gateway.request(turn, Ack(), timeout=PATIENCE_S) for _ in range(20)]
        return {answer.detail for answer in answers if isinstance(answer, Ack)}

    assert (await answered(""), await answered("eu")) == ({""}, {"eu"})
    await serving["eu"].unsubscribe()
    await actors["eu"].connection.flush()
    assert await answered("eu") == {""}, "without an actor of its own, the region's clients go to the others"
    load = Traffic(region="eu", server="r-1", active=0, waiting=0, requests_per_s=0.0, capacity=1)
    await actors["eu"].emit(traffic, load)
    assert await asyncio.wait_for(heard.get(), PATIENCE_S) == load


async def test_weights_come_from_the_hub_alone(brokers: World) -> None:
    hub = await brokers.connect("weight_sync")
    here = await brokers.connect("weight_sync", region="eu")
    seq = await hub.publish("hr.weights.r3.head", HEAD)
    with pytest.raises(NoResponders):
        await here.connection.call("hr.weights.r3.head", b"forged")
    assert await hub.last_seq("HR_WEIGHTS") == seq
    async for received in here.follow("HR_WEIGHTS", "hr.weights.r3.head"):
        assert (received.seq, received.message) == (seq, HEAD)
        break


async def test_collecting_in_a_region_leaves_the_hub_alone(brokers: World) -> None:
    """Mirrors do not follow purges: what is collected at the hub is collected in every region as well."""
    hub, here = await brokers.connect("weight_sync"), await brokers.connect("trainer", region="eu")
    await hub.publish("hr.weights.r5.head", HEAD)
    reader = await brokers.connect("weight_sync", region="eu")
    async for _ in reader.follow("HR_WEIGHTS", "hr.weights.r5.head"):
        break
    assert await here.purge("HR_WEIGHTS", subject="hr.weights.r5.head") == 1
    assert await hub.last("HR_WEIGHTS", "hr.weights.r5.head") is not None
    assert await reader.last("HR_WEIGHTS", "hr.weights.r5.head") is None


async def test_nothing_of_users_lies_in_a_region(brokers: World) -> None:
    """Law 9: a purge that the hub carries out leaves no copy, for what is written here is stored there alone."""
    here, hub = await brokers.connect("rollout", region="eu"), await brokers.connect("feedback")
    failed = records.failed("ab12.s1", 0, 0, "sandbox_lost", lane="production", run="r6")
    await here.publish(FAIL.at(run="r6", group="ab12.s1"), failed)
    done = TurnDone(run="r6", trajectory="ab12.s1-0-0", index=0, results=())
    await here.publish(TURN.at(run="r6", trajectory="ab12.s1-0-0"), done)
    stored = brokers.regions["eu"].server.folder / "store" / "jetstream"
    assert [path.name for path in stored.glob("*/streams/*")] == ["HR_WEIGHTS"]
    assert await hub.purge("HR_TURN", subject="hr.turn.r6.ab12.*") == 1
    assert [r async for r in here.history("HR_TURN", TURN.where(run="r6"))] == []


async def test_a_region_neither_purges_nor_declares_in_the_hub(brokers: World) -> None:
    hub, here = await brokers.connect("curriculum"), await brokers.connect("admin", region="eu")
    where = LEDGER.at(run="r4", group="g")
    await hub.publish(where, Event(actor="a", id="a", kind="k"))
    for name in ("PURGE", "DELETE", "UPDATE", "CREATE"):
        with pytest.raises((NoResponders, Denied)):
            await here.connection.api(f"STREAM.{name}.HR_LEDGER", {"name": "HR_LEDGER", "subjects": ["hr.ledger.>"]})
    assert await hub.tail("HR_LEDGER", where) > 0
    with pytest.raises(BusError, match="has another HR_WEIGHTS"):
        await regions.declare_mirror(await brokers.connect("admin"))


def test_every_stream_is_near_or_far() -> None:
    assert {stream.name for stream in STREAMS} == {
        *regions.NEAR,
        *(name for name in regions.FAR if not name.startswith("KV_")),
    }
    for role in ROLES:
        for before, after in zip(of(role).publish, regions.near_permissions(role).publish, strict=False):
            near = before == "$JS.API.INFO" or "HR_WEIGHTS" in before
            assert near or not after.startswith("$JS.API."), f"{role} may ask its region for {after}"


def test_a_region_is_prepared_in_private_and_a_bad_one_is_a_sentence(tmp_path: Path) -> None:
    hub = regions.prepare_hub(tmp_path / "hub")
    key = hub / regions.LINKS
    for name in ("hub", "EU", "a.b", ""):
        with pytest.raises(BusError, match="expected a region name"):
            regions.prepare_region(tmp_path / "x", name, "nats-leaf://h:1", key)
    with pytest.raises(BusError, match=r"does not hold the seeds"):
        regions.prepare_region(tmp_path / "x", "eu", "nats-leaf://h:1", tmp_path / "none")
    folder = regions.prepare_region(tmp_path / "eu", "eu", "nats-leaf://h:1", key)
    secret = (key / "rollout.nk").read_text().strip()
    for file in folder.rglob("*"):
        if file.is_file() and secret in file.read_text():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_folder_of_a_region_does_not_open_the_hub(brokers: World) -> None:
    stranger = brokers.regions["eu"].server.credentials
    with pytest.raises(CredentialsRefused):
        await Bus.connect(brokers.hub.url, role="rollout", credentials=stranger)


async def test_a_broker_with_another_key_does_not_get_in(brokers: World) -> None:
    stranger = regions.prepare_hub(brokers.folder / "other hub") / regions.LINKS
    link = f"nats-leaf://127.0.0.1:{brokers.regions['eu'].wire.port}"
    folder = regions.prepare_region(brokers.folder / "stranger", "stranger", link, stranger)
    async with Server(folder, prepared=True), asyncio.timeout(PATIENCE_S):
        while "Authorization Violation" not in (folder / "log").read_text():
            await asyncio.sleep(0.05)  # a broker offers no event for this
    assert 'remote "stranger"' not in (brokers.hub.folder / "log").read_text()
