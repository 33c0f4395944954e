"""What one process of several does, run by torchrun: three updates on one batch, a checkpoint, and one more."""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headrace.algorithms.mismatch import mismatch
from headrace.training import distributed
from headrace.training.batch import Batch, build
from headrace.training.state import TrainerState
from headrace.weights.state import state_hash
from tests.training.world import CONFIG, batch, model

MICRO_TOKENS = 64
ALGORITHM = msgspec.structs.replace(CONFIG.algorithm, grad_clip=0.05)


def data() -> Batch:
    manifest, trajectories, scores = batch({0: model()}, 0, [0, 0, 0, 0])
    return build(manifest.groups, trajectories, scores)


def told(taken: distributed.Taken, state: TrainerState) -> dict[str, object]:
    assert not taken.failed
    return {
        "loss": taken.loss,
        "norm": taken.grad_norm,
        "k3": taken.seen.k3,
        "hash": state_hash(distributed.published(state.model)),
    }


def main(folder: Path, experts: bool, resume: bool) -> None:
    torch.set_num_threads(1)
    world = distributed.start()
    seed = 0 if not resume else 9  # a resumed process starts from other weights, and must not end with them
    state = TrainerState(distributed.shard(model(seed), world, expert_parallel=experts))
    made = data()
    steps = []
    if resume:
        distributed.load(state, folder / "checkpoint")
        steps.append(told(distributed.Taken(0.0, 0.0, mismatch(torch.empty(0), torch.empty(0)), ""), state))
    for number in range(1 if resume else 4):
        if number == 3:
            distributed.save(state, folder / "checkpoint")
        steps.append(told(distributed.take(state, world, made, ALGORITHM, MICRO_TOKENS), state))
    digest = distributed.publish(state.model, world, folder / f"published{int(resume)}.safetensors")
    if world.rank == 0:
        (folder / f"steps{int(resume)}.json").write_text(json.dumps({"steps": steps, "published": digest}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "experts" in sys.argv, "resume" in sys.argv)
