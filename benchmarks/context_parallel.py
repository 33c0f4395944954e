"""Trains on a packed batch of 64k tokens with one rank, and with two that share them.

    python -m benchmarks.context_parallel [--tokens 65536] [--sequence 8192]

A small mixture samples sequences whose tokens are mostly given, as they are with long outputs of tools. The trainer
actor takes one step on all of them as one micro-batch: alone, and with `ranks = 2`, `context_ranks = 2`, each in a new
process with its own broker. The benchmark compares the figures of the step, the update, and how far each process's
memory grows in the step, beside the plan of `headrace trainer plan`. Allocations are mapped one by one
(MALLOC_MMAP_THRESHOLD_), so that freed tensors leave the resident memory.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish
from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Policy
from headrace.messages.base import Array
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.subjects import STEP
from headrace.messages.tasks import TaskRef
from headrace.messages.training import SnapshotReady, StepDone, StepFailed
from headrace.policy.cache import KVCache
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training import memory_plan
from headrace.training.figures.layout import layout_of
from headrace.weights import tensor_state
from tests.support import world
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.recorded_run import RunFeeder, config, new_run

SECTION = Policy(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_dim=64, vocab=340)
POLICY = hugging_face.from_section(SECTION)
DRAWN = 8
"""Sampled tokens of a turn."""
TURNS = 4
ARMS = {"one": {}, "two": {"ranks": 2, "context_ranks": 2}}
COMPARED = ("loss", "entropy", "k1", "k3", "clipped")


@torch.no_grad()
def sampled(model: Model, slot: int, tokens: int) -> Trajectory:
    """A trajectory of TURNS turns in which `tokens` positions were forwarded, on the model's device."""
    draw, there = torch.Generator().manual_seed(slot), model.embedding.device
    cache, table = KVCache(model.config, -(-tokens // 64), there), [[*range(-(-tokens // 64))]]
    covered, pending, turns = 0, torch.empty(0, dtype=torch.int64), []
    for index in range(TURNS):
        end = tokens * (index + 1) // TURNS - DRAWN + 1  # the last drawn token of a turn is forwarded in the next
        prompt = torch.randint(0, 256, (end - covered - len(pending),), generator=draw)
        new, ids, logprobs, routes, first = torch.cat((pending, prompt)), [], [], [], covered
        for _ in range(DRAWN):
            recorder: list[torch.Tensor] = []
            hidden = model.forward_cached(new.to(there), [len(new)], [covered], table, cache, recorder=recorder)[-1:]
            covered += len(new)
            if recorder:
                routes.append(torch.stack(recorder, 1).to(torch.uint8).cpu())
            new = torch.multinomial(torch.softmax(model.logits(hidden).float().cpu(), -1)[0], 1, generator=draw)
            ids.append(int(new))
            logprobs.append(float(model.selected_logprobs(hidden, new.to(there))[0]))
        pending, routed = new, torch.cat(routes) if routes else None
        turns.append(
            Turn(
                index=index,
                segment=0,
                prompt_ids=Array.of(prompt.tolist(), "<i4"),
                ids=Array.of(ids, "<i4"),
                logprobs=Array.of(logprobs, "<f4"),
                routed=None if routed is None else Array("|u1", tuple(routed.shape), routed.numpy().tobytes()),
                spans=(Span(first, covered, 0),),
            )
        )
    return Trajectory(
        run="r",
        lane="train",
        group="g000000",
        slot=slot,
        attempt=0,
        id=f"g000000-{slot}-0",
        task=TaskRef("even", "0"),
        family="even",
        seed=slot,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(turns),
        diff={},
        fingerprint=model.numerics.fingerprint,
    )


def setting(folder: Path, sequences: int, tokens: int, arm: str) -> Config:
    """The run's configuration: one step of one micro-batch."""
    trainer: dict[str, Any] = {"micro_tokens": tokens, "rescore": 1, **ARMS[arm]}
    curriculum = {"group_size": sequences, "groups_per_step": 1, "steps": 1}
    made = config(folder, trainer=trainer, curriculum=curriculum)
    return msgspec.structs.replace(made, policy=SECTION)


def status(process: int, key: str) -> int:
    """Bytes of a key of /proc/PID/status."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def processes(trainer: Any) -> list[int]:
    """All ranks of a trainer."""
    others = getattr(trainer, "others", None)
    return [os.getpid(), *(process.pid for process in (others.processes if others is not None else ()))]


async def one_step(
    folder: Path,
    setup: Config,
    records: Sequence[Trajectory],
    begin: Callable[[Trainer], None] = lambda _: None,
    end: Callable[[], None] = lambda: None,
) -> tuple[StepDone, SnapshotReady, float]:
    """A step of a trainer actor with one group of trajectories, and the version that it makes; the seconds from the
    group's end to the step's record. begin, end: called right before and after."""
    async with Server(folder / "broker") as server:
        async with (
            await as_writers(server.url, server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
        ):
            await declare(admin)
            feeder = RunFeeder(admin, new_run(), folder)
            async with living(Trainer, setup, bus, feeder.run) as actor:
                await feeder.version(0)
                begin(actor)
                await feeder.close(records[0].group, records, 0)
                started = time.perf_counter()
                async for received in admin.follow("HR_STEP", STEP.at(run=feeder.run)):
                    record = received.message
                    if isinstance(record, StepDone | StepFailed):
                        break
                seconds = time.perf_counter() - started
                assert isinstance(record, StepDone), record
                end()
                return record, await feeder.version(1), seconds


def recorded(folder: Path, start: Model, sizes: Sequence[int]) -> list[Trajectory]:
    """Trajectories of these lengths, sampled from a policy, which `arm` and its like read from the folder."""
    made = [sampled(start, slot, size) for slot, size in enumerate(sizes)]
    rewards = [world.score(one).reward for one in made]
    if statistics.fmean(rewards) in rewards:
        cannot_run("a sequence has the mean reward, so it is not trained on; choose other lengths or numbers of them")
    (folder / "records").write_bytes(msgspec.msgpack.encode(made))
    return made


async def arm(folder: Path, tokens: int, sequence: int, name: str) -> Figures:
    """One step with the trajectories of the folder."""
    world.POLICY, world.NUMERICS = POLICY, probe(POLICY)
    records = msgspec.msgpack.decode((folder / "records").read_bytes(), type=list[Trajectory])
    setup = setting(folder, tokens // sequence, tokens, name)
    members: list[int] = []
    before: list[int] = []
    peaks: list[int] = []

    def begin(actor: Trainer) -> None:
        members.extend(processes(actor.trainer))
        before.extend(status(member, "VmRSS") for member in members)
        for member in members:
            Path(f"/proc/{member}/clear_refs").write_text("5")  # VmHWM starts again

    def end() -> None:
        peaks.extend(status(member, "VmHWM") for member in members)

    record, last, seconds = await one_step(folder, setup, records, begin, end)
    plan = memory_plan.plan(POLICY, layout_of(setup))
    assert record.efficiency is not None
    return {
        **{key: getattr(record, key) for key in COMPARED},
        "grad_norm": record.grad_norm,
        "max_abs_dlp": record.max_abs_dlp,
        "rescored_tokens": record.rescored_tokens,
        "forwarded_tokens": record.efficiency.forwarded_tokens,
        "seconds": seconds,
        "communication_s": record.efficiency.seconds["communication"],
        "peaks": [peak - held for peak, held in zip(peaks, before, strict=True)],
        "plan": plan.backward,
        "path": last.path,
        "hash": last.state_hash,
    }


def run(folder: Path, tokens: int, sequence: int, name: str) -> Figures:
    """One arm in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.context_parallel", "--arm", name, "--folder", str(folder)]
    command += ["--tokens", str(tokens), "--sequence", str(sequence)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )  # fmt: skip
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    print(name, json.dumps(figures), flush=True)
    return figures


def error(start: dict[str, torch.Tensor], one: str, two: str) -> float:
    """Relative L2 error of the second update against the first."""
    first, second = tensor_state.read(Path(one)), tensor_state.read(Path(two))
    far = sum(float((second[name].double() - first[name].double()).square().sum()) for name in first)
    moved = sum(float((first[name].double() - start[name].double()).square().sum()) for name in first)
    return float((far / moved) ** 0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all arms and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--arm", choices=ARMS, help="one arm alone, for the benchmark itself")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.arm:
        print(json.dumps(asyncio.run(arm(args.folder, args.tokens, args.sequence, args.arm))))
        return
    with tempfile.TemporaryDirectory(prefix="headrace-context-") as name:
        folder = Path(name)
        start = Model(POLICY, probe(POLICY), seed=world.CONFIG.run.seed)
        sequences = args.tokens // args.sequence
        recorded(folder, start, [args.sequence] * sequences)
        one, two = (run(folder, args.tokens, args.sequence, arm) for arm in ARMS)
        update = error(start.state(), one["path"], two["path"])
    equal = all(one[key] == two[key] for key in COMPARED)
    figures = {
        "tokens": args.tokens,
        "sequences": sequences,
        "computed_tokens": two["forwarded_tokens"] - args.sequence,
        "sampled_tokens": sequences * TURNS * DRAWN,
        "loss": one["loss"],
        "loss_two_ranks": two["loss"],
        "equal_figures": int(equal),
        "relative_error_of_update": update,
        "relative_error_of_gradient_norm": abs(two["grad_norm"] / one["grad_norm"] - 1.0),
        "max_abs_dlp": max(one["max_abs_dlp"], two["max_abs_dlp"]),
        "rescored_tokens": two["rescored_tokens"],
        "planned_mib": round(one["plan"] / 2**20, 1),
        "peak_mib": round(one["peaks"][0] / 2**20, 1),
        "planned_mib_two_ranks": round(two["plan"] / 2**20, 1),
        "peak_mib_rank_0": round(two["peaks"][0] / 2**20, 1),
        "peak_mib_rank_1": round(two["peaks"][1] / 2**20, 1),
        "peak_two_ranks_x": round(max(two["peaks"]) / one["peaks"][0], 3),
        "seconds_one": round(one["seconds"], 1),
        "seconds_two_ranks_x": round(two["seconds"] / one["seconds"], 3),
        "communication_share": round(two["communication_s"] / two["seconds"], 3),
    }
    targets = {
        "computed_tokens": at_least(figures["computed_tokens"], args.tokens),
        "equal_figures": at_least(figures["equal_figures"], 1),
        "relative_error_of_update": at_most(update, 1e-5),
        "peak_two_ranks_x": at_most(figures["peak_two_ranks_x"], 0.65),
    }
    finish(figures, targets, "torch")


if __name__ == "__main__":
    main()
