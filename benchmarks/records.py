"""Bytes at the broker and processor time of a step's routes: a scaled step through the real codec and a real broker.

The attempts have random routes of a mixture (48 layers, 8 of 128 experts by default), which are the worst case: 242
bytes a position hold a uniform choice. `route_bytes` and `broker_bytes` count one position; gigabytes and CPU-seconds
count 15 million. In figures that begin with `shared`, sampler and trainer share a folder (`[bus] blob_dir`).

    python -m benchmarks.records --attempts 24 --positions 4000
"""

import argparse
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from benchmarks.conditions import arguments, at_most, finish
from headrace.actors.rollout.publication import publish
from headrace.actors.rollout.turn_log import TurnLog
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.messages.base import Array
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import Span, Turn
from headrace.messages.subjects import TRAJ
from headrace.messages.training import BatchGroup
from headrace.policy import routes
from headrace.replay.fetching import fetch
from tests.support import records

STEP = 15_000_000
"""Positions of the step whose figures are computed."""


def random_routes(positions: int, layers: int, k: int, experts: int) -> np.ndarray:
    """Routes as a server reports them: int32, the best expert first."""
    draws = np.random.default_rng()
    rows = [draws.random((layers, experts), "f4").argpartition(k, axis=1)[:, :k] for _ in range(positions)]
    return np.stack(rows).astype("i4")


async def measure(
    attempts: int, turns: int, positions: int, shape: tuple[int, int, int], folder: Path, *, shared: bool
) -> dict[str, float]:
    """Publish the attempts as a rollout actor does, and fetch them as a trainer does. shared: through one folder."""

    def share(bus: Bus) -> None:
        if shared:
            bus.use_shared_memory(SharedMemoryStore.open(folder / "blobs", "never", "node"))

    raw = [random_routes(positions, *shape) for _ in range(turns)]
    spent: dict[str, float] = {}

    def lap(name: str, since: float) -> float:
        now = time.process_time()
        spent[name] = spent.get(name, 0.0) + now - since
        return now

    async with Server(folder) as server:
        async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as admin:
            await declare(admin)
        async with await Bus.connect(server.url, role="rollout", credentials=server.credentials) as bus:
            share(bus)
            for slot in range(attempts):
                issued: SlotIssued = msgspec.structs.replace(records.issued("g1", slot, 0), run="step")
                made = records.trajectory(issued)
                log, recorded = TurnLog(bus, "step", "g1", made.id), []
                for index, wide in enumerate(raw):
                    at = time.process_time()
                    narrow = routes.ascending(wide.astype("u1"))
                    at = lap("sort", at)
                    ids = Array("<i4", (positions,), np.arange(positions, dtype="<i4").tobytes())
                    logprobs = Array(
                        "<f4", (positions,), np.random.default_rng(index).random(positions, "f4").tobytes()
                    )
                    span = Span(index * positions, (index + 1) * positions, 0)
                    turn = Turn(
                        index=index, segment=0, prompt_ids=Array.of([], "<i4"), ids=ids, logprobs=logprobs,
                        routed=Array("|u1", narrow.shape, narrow.tobytes()), spans=(span,),
                    )  # fmt: skip
                    at = time.process_time()
                    await log.sampled(turn, "n", "s", "f")
                    lap("pack_and_publish", at)
                    recorded.append(turn)
                at = time.process_time()
                await publish(bus, msgspec.structs.replace(made, turns=tuple(recorded)), log.first)
                lap("pack_and_publish", at)
            learner = await Bus.connect(server.url, role="trainer", credentials=server.credentials)
            share(learner)
        async with learner as bus:
            stored = [each.seq async for each in bus.history("HR_TRAJ", TRAJ.at(run="step", group="g1"))]
            group = BatchGroup(group="g1", close_seq=1, slots=tuple((seq, 10**6) for seq in stored))
            at = time.process_time()
            trajectories, _ = await fetch(bus, [group])
            lap("fetch_and_unpack", at)
            assert sum(len(turn.routed or ()) for made in trajectories.values() for turn in made.turns) == (
                attempts * turns * positions
            )
        async with await Bus.connect(server.url, role="operator", credentials=server.credentials) as bus:
            held = 0
            for name in ("HR_TRAJ", "HR_TURN", "HR_BLOB"):
                reply = msgspec.json.decode(await bus.connection.api(f"STREAM.INFO.{name}", {}))
                held += reply["state"]["bytes"]
    count = attempts * turns * positions
    packed = routes.pack(Array("|u1", raw[0].shape, routes.ascending(raw[0].astype("u1")).tobytes()))
    assert packed is not None
    return {
        "positions": count,
        "route_bytes": round(len(packed.data) / positions, 1),
        "broker_bytes": round(held / count, 1),
        "broker_gb": round(held / count * STEP / 1e9, 2),
        **{f"{name}_cpu_s": round(seconds / count * STEP, 1) for name, seconds in spent.items()},
        "cpu_s": round(sum(spent.values()) / count * STEP, 1),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--positions", type=int, default=1000, help="of a turn")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    args = arguments(parser, attempts=1, turns=1, positions=200)
    with tempfile.TemporaryDirectory() as folder:
        shape = (args.layers, args.top_k, args.experts)
        made = dict[str, float]()
        for shared in (False, True):
            place = Path(folder) / str(shared)
            figures = uvloop.run(measure(args.attempts, args.turns, args.positions, shape, place, shared=shared))
            made |= {f"shared_{name}" if shared else name: value for name, value in figures.items()}
    targets = {
        "route_bytes": at_most(made["route_bytes"], 260.0),
        "broker_gb": at_most(made["broker_gb"], 4.5),
        "shared_broker_gb": at_most(made["shared_broker_gb"], 0.1),
        "cpu_s": at_most(made["cpu_s"], 20.0),
        "shared_cpu_s": at_most(made["shared_cpu_s"], 20.0),
    }
    finish(made, targets, "zstandard", "numpy")


if __name__ == "__main__":
    main()
