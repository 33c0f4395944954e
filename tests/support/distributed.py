"""The program of one process of several, run by torchrun: three updates on one batch, a checkpoint, and one more."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from headrace.config import Algorithm
from headrace.policy.model import Model
from headrace.training.batch import Batch, build
from headrace.training.gradient import Helpers, Recipe
from headrace.training.outcome import StepOutcome
from headrace.training.parallel import distributed
from headrace.training.step import take
from tests.support.world import CONFIG, NUMERICS, POLICY, batch, model

MICRO_TOKENS = 64
ALGORITHM = msgspec.structs.replace(CONFIG.algorithm, grad_clip=0.05)
PARTS = msgspec.structs.replace(ALGORITHM, weighting="decoupled", minibatches=2)
"""Two updates a batch, against the trainer's own log-probabilities from before the first."""


def data() -> Batch:
    manifest, trajectories, scores = batch({0: model()}, 0, [0, 0, 0, 0])
    return build(manifest.groups, trajectories, scores)


def algorithm(words: Sequence[str]) -> Algorithm:
    return PARTS if "parts" in words else ALGORITHM


def policy(words: Sequence[str], seed: int = 0) -> Model:
    if "mxfp8" not in words:
        return model(seed)
    return Model(msgspec.structs.replace(POLICY, expert_format="mxfp8"), NUMERICS, seed=seed)


def told(out: StepOutcome) -> dict[str, object]:
    assert not out.failed, out.detail
    return {"loss": out.loss, "norm": out.grad_norm, "k3": out.k3, "entropy": out.entropy, "hash": out.state_hash}


def main(folder: Path, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    world = distributed.start()
    resume = "resume" in words
    seed = 0 if not resume else 9  # a resumed process starts from other weights, and must not end with them
    own = distributed.shard(policy(words, seed), world, expert_parallel="experts" in words)
    state, made = distributed.ShardedState(own), data()
    steps: list[dict[str, object]] = []
    if resume:
        distributed.load(state, folder / "checkpoint")
        steps.append({"hash": state.hash()})
    for number in range(1 if resume else 4):
        if number == 3:
            distributed.save(state, folder / "checkpoint")
        out = take(state, made, Recipe(algorithm(words), MICRO_TOKENS, bound=9), helpers=Helpers(data_parallel=world))
        steps.append(told(out))
    digest = distributed.publish(state, world, folder / f"published{int(resume)}.safetensors")
    if world.rank == 0:
        (folder / f"steps{int(resume)}.json").write_text(json.dumps({"steps": steps, "published": digest}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    distributed.stop()
