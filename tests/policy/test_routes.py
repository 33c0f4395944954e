"""Routes are stored once, in few bytes, in the turn log; the judge's record has none, and the trainer's has all."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from headrace.actors.rollout.publication import publish
from headrace.actors.rollout.turn_log import TurnLog
from headrace.messages.base import Array
from headrace.messages.rollout import PackedRoutes, Span, Trajectory, Turn
from headrace.messages.subjects import TRAJ, TURN
from headrace.messages.training import BatchGroup
from headrace.policy import routes
from headrace.replay.fetching import fetch
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio
NONE = Array.of([], "<i4")


def uniform(positions: int, layers: int, k: int, experts: int, dtype: str = "|u1") -> np.ndarray:
    draws = np.random.default_rng(1)
    order = draws.random((positions * layers, experts)).argpartition(k, axis=1)[:, :k]
    ordered: np.ndarray = routes.ascending(order.astype(dtype).reshape(positions, layers, k))
    return ordered


def array(values: np.ndarray) -> Array:
    return Array(values.dtype.str, values.shape, values.tobytes())


@pytest.mark.parametrize("count", range(1, 12))
def test_the_network_sorts(count: int) -> None:
    """A network sorts all lists if it sorts all lists of zeros and ones (Knuth, 5.3.4)."""
    lists = np.array(list(itertools.product((0, 1), repeat=count)), "u1").reshape(-1, 1, count)
    assert (routes.ascending(lists) == np.sort(lists, axis=-1)).all()


@pytest.mark.parametrize(("k", "experts", "dtype"), [(8, 128, "|u1"), (1, 16, "|u1"), (6, 160, "|u1"), (8, 384, "<u2")])
def test_routes_come_back(k: int, experts: int, dtype: str) -> None:
    values = uniform(300, 5, k, experts, dtype)
    values[7] = np.iinfo(dtype).max  # a position without a record
    packed = routes.pack(array(values))
    assert packed is not None and len(packed.data) < values.nbytes
    assert routes.unpack(packed) == array(values)


def test_a_position_of_48_layers_needs_260_bytes() -> None:
    values = uniform(1000, 48, 8, 128)
    packed = routes.pack(array(values))
    assert packed is not None and len(packed.data) / len(values) < 260  # 242 hold the choice, 384 a list


@pytest.mark.parametrize("order", ["descending", "drawn"])
def test_an_order_of_experts_is_kept(order: str) -> None:
    values = uniform(50, 4, 8, 128)[:, :, ::-1].copy()
    if order == "drawn":
        np.random.default_rng(2).permuted(values, axis=-1, out=values)
    stored = routes.on_wire(sampled(0, values))
    assert (stored.packed is UNSET) == (order == "drawn"), "lists without an order save less than a fifth"
    assert routes.in_memory(stored).routed == array(values)


@pytest.mark.parametrize("data", [b"", b"no frame", "cut"])
def test_damaged_routes_are_an_error_of_their_record(data: bytes | str) -> None:
    packed = routes.pack(array(uniform(200, 4, 8, 128)))
    assert packed is not None
    damaged = packed.data[:-9] if isinstance(data, str) else data
    for wrong in (PackedRoutes(packed.dtype, packed.shape, damaged), PackedRoutes("|u1", (1, 4, 8), packed.data)):
        with pytest.raises(ValueError, match="packed routes"):
            routes.unpack(wrong)


def sampled(index: int, values: np.ndarray) -> Turn:
    spans = (Span(index * len(values), (index + 1) * len(values), 0),)
    logprobs = Array.of([], "<f4")
    return Turn(index=index, segment=0, prompt_ids=NONE, ids=NONE, logprobs=logprobs, routed=array(values), spans=spans)


async def test_the_turn_log_alone_holds_the_routes_of_a_training_attempt(connect: Connect, tmp_path: Path) -> None:
    bus, run = await connect("rollout"), "routes"
    turns = [sampled(index, uniform(64, 4, 8, 128)) for index in range(3)]
    slots = []
    for slot, lane in enumerate(("train", "production")):
        issued = msgspec.structs.replace(records.issued("g1", slot, 0), run=run, lane=lane)
        made = msgspec.structs.replace(records.trajectory(issued), turns=tuple(turns))
        log = TurnLog(bus, run, "g1", made.id)
        for turn in turns:
            await log.sampled(turn, "n", "s", "f")
            await log.done(turn.index, ())
        await log.flush()
        resumed = await TurnLog(bus, run, "g1", made.id).read()
        assert [turn.routed for turn in resumed.turns] == [turn.routed for turn in turns]
        await publish(bus, made, log.first)
        slots.append(log.first)
    reader = await connect("trainer")
    stored = [each async for each in reader.history("HR_TRAJ", TRAJ.at(run=run, group="g1"))]
    train, user = (each.message for each in stored)
    assert isinstance(train, Trajectory) and isinstance(user, Trajectory)
    assert train.turns_from == slots[0] > 0 == user.turns_from
    assert all(turn.routed is None and turn.packed is UNSET for turn in train.turns)
    assert all(turn.routed is None and turn.packed is not UNSET for turn in user.turns)
    group = BatchGroup(group="g1", close_seq=1, slots=tuple((each.seq, 10**6) for each in stored))
    for role in ("trainer", "replay"):
        trajectories, _ = await fetch(await connect(role), [group])
        assert [[turn.routed for turn in made.turns] for made in trajectories.values()] == [
            [turn.routed for turn in turns]
        ] * 2
    await reader.purge("HR_TURN", subject=TURN.at(run=run, trajectory=train.id))
    trajectories, _ = await fetch(reader, [group])
    assert [turn.routed for turn in trajectories[stored[0].seq].turns] == [None] * 3
