"""A step of two ranks on sequences of skewed lengths, with micro-batches in both orders of `[trainer] micro_order`.

    python -m benchmarks.dealing [--sequences 128] [--longest 8192] [--repeats 7]

A small mixture samples sequences whose tokens are mostly given, as with long outputs of tools. Their lengths follow a
log-normal distribution, cut at `--longest`, which is also the budget of a micro-batch. The trainer actor with
`[trainer] ranks = 2` takes one step on them, in a new process with its own broker for every step; the two orders
alternate. Compared: the seconds of the step (without re-scoring), and what the predicted operations say: the slowest
micro-batch of each round, summed, over an even division. One process takes the step in each order too: its version must
be that of two ranks.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.conditions import Figures, at_least, at_most, finish
from benchmarks.context_parallel import POLICY, SECTION, one_step, recorded
from headrace.messages.rollout import Trajectory
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training.batches.micro_batch import flops, micro_batches
from headrace.training.batches.segment import segments_of
from tests.support import world
from tests.support.recorded_run import config

ORDERS = ("index", "flops")
RANKS = 2


def lengths(count: int, longest: int) -> list[int]:
    """Positions of each sequence: a median of a sixteenth of the longest."""
    draw = random.Random(5)
    return [min(longest, max(64, int(longest / 16 * draw.lognormvariate(0.0, 1.5)))) for _ in range(count)]


async def step(folder: Path, order: str, ranks: int, budget: int) -> Figures:
    """One step with the trajectories of the folder."""
    world.POLICY, world.NUMERICS = POLICY, probe(POLICY)
    records = msgspec.msgpack.decode((folder / "records").read_bytes(), type=list[Trajectory])
    trainer: dict[str, Any] = {"micro_tokens": budget, "rescore": 0, "ranks": ranks, "micro_order": order}
    curriculum = {"group_size": len(records), "groups_per_step": 1, "steps": 1}
    setup = msgspec.structs.replace(config(folder, trainer=trainer, curriculum=curriculum), policy=SECTION)
    record, last, _ = await one_step(folder, setup, records)
    return {"seconds": record.seconds, "hash": last.state_hash}


def run(folder: Path, order: str, ranks: int, budget: int) -> Figures:
    """One step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.dealing", "--folder", str(folder), "--order", order]
    command += ["--ranks", str(ranks), "--longest", str(budget)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    print(order, ranks, json.dumps(figures), flush=True)
    return figures


def predicted(records: Sequence[Trajectory], order: str, budget: int) -> tuple[int, float]:
    """The number of micro-batches, and the slowest of each round, summed, over an even division."""
    segments = [segment for record in records for segment in segments_of(record)]
    costs = [flops(POLICY, part) for part in micro_batches(segments, budget, POLICY, order)]
    rounds = [costs[first : first + RANKS] for first in range(0, len(costs), RANKS)]
    return len(costs), sum(map(max, rounds)) / (sum(costs) / RANKS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all steps and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--order", choices=ORDERS, help="one step alone, for the benchmark itself")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.order:
        print(json.dumps(asyncio.run(step(args.folder, args.order, args.ranks, args.longest))))
        return
    with tempfile.TemporaryDirectory(prefix="headrace-dealing-") as name:
        folder = Path(name)
        start = Model(POLICY, probe(POLICY), seed=world.CONFIG.run.seed)
        sizes = lengths(args.sequences, args.longest)
        made = recorded(folder, start, sizes)
        alone = {order: run(folder, order, 1, args.longest) for order in ORDERS}
        told: dict[str, list[Figures]] = {order: [] for order in ORDERS}
        for _ in range(args.repeats):
            for order in ORDERS:
                told[order].append(run(folder, order, RANKS, args.longest))
    seconds = {order: [each["seconds"] for each in told[order]] for order in ORDERS}
    ratios = [after / before for before, after in zip(seconds["index"], seconds["flops"], strict=True)]
    expected = {order: predicted(made, order, args.longest) for order in ORDERS}
    equal = all(each["hash"] == alone[order]["hash"] for order in ORDERS for each in told[order])
    figures = {
        "sequences": len(sizes),
        "tokens": sum(sizes),
        "micro_batches": expected["index"][0],
        "equal_versions_of_one_and_two_ranks": int(equal),
        **{f"seconds_one_rank_{order}": round(alone[order]["seconds"], 2) for order in ORDERS},
        **{f"seconds_two_ranks_{order}": [round(each, 2) for each in seconds[order]] for order in ORDERS},
        **{f"predicted_over_even_{order}": round(expected[order][1], 3) for order in ORDERS},
        **{f"seconds_two_ranks_{order}_median": round(statistics.median(seconds[order]), 2) for order in ORDERS},
        "seconds_flops_over_index": round(statistics.median(ratios), 3),
        "predicted_flops_over_index": round(expected["flops"][1] / expected["index"][1], 3),
    }
    targets = {
        "equal_versions_of_one_and_two_ranks": at_least(figures["equal_versions_of_one_and_two_ranks"], 1),
        "seconds_flops_over_index": at_most(figures["seconds_flops_over_index"], 1.0),
    }
    finish(figures, targets, "torch")


if __name__ == "__main__":
    main()
