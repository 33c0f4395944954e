"""Findings about the trainer's devices on machines with given GPUs."""

from typing import Any

import msgspec
import pytest

from headrace.config import Config, Mesh
from headrace.launch.checks.trainer import on_devices
from headrace.metrics.gpus import Gpu

EIGHT = (Gpu(free=80 << 30, total=80 << 30, busy=None),) * 8


def found(devices: tuple[Gpu, ...] = EIGHT, **sections: dict[str, Any]) -> list[tuple[str, bool, str]]:
    config = Config()
    for name, keys in sections.items():
        config = msgspec.structs.replace(config, **{name: msgspec.structs.replace(getattr(config, name), **keys)})
    return [msgspec.structs.astuple(finding) for finding in on_devices(config, devices, frozenset({"trainer"}))]


@pytest.mark.parametrize(("ranks", "nodes", "fits"), [(8, 1, True), (16, 2, True), (16, 1, False), (32, 2, False)])
def test_each_node_needs_gpus_for_its_own_ranks(ranks: int, nodes: int, fits: bool) -> None:
    ((part, good, text),) = found(
        trainer={"mesh": Mesh(shard=ranks), "node_ranks": ranks // nodes, "rendezvous": "node0:29500"}
    )
    assert good == fits, text
    if fits:
        assert part == "trainer" and "of a GPU of each of 8 processes" in text
    else:
        processes = "16 processes" if nodes == 1 else "16 processes of each of 2 nodes"
        assert part == "trainer.mesh" and f"{processes} need a GPU each, this machine has 8" in text


def test_the_hosts_memory_holds_the_optimizer_of_this_nodes_ranks() -> None:
    of_one, of_two = (
        found(
            trainer={
                "mesh": Mesh(replicate=nodes, shard=8),
                "node_ranks": 8,
                "rendezvous": "node0:29500",
                "offload": "optimizer",
            }
        )[1]
        for nodes in (1, 2)
    )
    assert of_one[0] == of_two[0] == "trainer.offload"
    needed = [text.partition(" of the host's memory")[0] for _, _, text in (of_one, of_two)]
    assert needed[0] == needed[1], "a node's ranks hold the whole optimizer once"


def test_a_long_context_counts_where_micro_batches_are_short() -> None:
    policy = {"layers": 48, "dim": 1024, "heads": 16, "head_dim": 64, "dtype": "bfloat16"}
    short, long = (found(EIGHT[:1], policy=policy, limits={"context_tokens": tokens})[0] for tokens in (4096, 131072))
    assert short[1], short[2]
    assert not long[1] and "set numerics.recompute = true" in long[2], long[2]
