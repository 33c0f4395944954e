"""The processes of a trainer's group send each other data: other bytes are refused and never run."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from headrace.config import Mesh
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.mid_training import ranks as mid_training
from headrace.training.parallel.mid_training.shards import Share
from headrace.training.parallel.nodes import values
from headrace.training.parallel.nodes.meeting import opened
from headrace.training.parallel.trainer import Order, Save, Stop
from tests.support.paths import ROOT


class Sums(NamedTuple):
    """As `gradient` has them."""

    loss: Tensor
    logp: Tensor


class Evil:
    """A pickle of it creates a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


OTHER = """
import os, sys, torch
from headrace.config import Mesh
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.trainer import Order
from tests.support.rank_processes import keys
group.join(torch.device("cpu"), 1, 2, keys(int(sys.argv[1])))
world = group.ProcessGroup(torch.device("cpu"), Mesh(shard=2))
waits = lambda: world.hear(Order), lambda: world.gathered("mine", str), lambda: world.holders.gathered(1.5, float)
for wait in waits:
    try:
        print(wait(), flush=True)
    except GroupError as error:
        print(f"refused: {error}", flush=True)
os._exit(0)
"""


def test_a_process_of_the_group_that_sends_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """The connections of a group cannot authenticate, so a peer may be anybody."""
    store = opened("127.0.0.1", 0)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", OTHER, str(store.port)]
    other = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, text=True, cwd=ROOT)
    sent = bytearray(pickle.dumps(Evil(tmp_path / "run")))
    data, size = torch.frombuffer(sent, dtype=torch.uint8), torch.tensor([len(sent)])
    try:
        group.join(torch.device("cpu"), 0, 2, PrefixStore("group", store))
        world = group.ProcessGroup(torch.device("cpu"), Mesh(shard=2))
        for part in (size, data):
            dist.broadcast(part, group_src=0, group=world.orders.group)
        for member in (None, world.holders.group):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, size, group=member)
            dist.all_gather([torch.empty(len(sent), dtype=torch.uint8) for _ in range(2)], data, group=member)
        said, _ = other.communicate(timeout=60)
    finally:
        other.kill()
        group.leave()
    assert not (tmp_path / "run").exists(), "the other process ran what was sent"
    assert [line.split(":")[0] for line in said.splitlines()] == ["refused"] * 3


def test_a_value_arrives_as_it_was_sent() -> None:
    sums = Sums(torch.tensor(1.5, dtype=torch.float64), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    out = values.decode(values.encode({3: sums, 0: Sums(torch.tensor(math.nan), torch.empty(0, 2))}), dict[int, Sums])
    assert torch.equal(out[3].loss, sums.loss)
    assert torch.equal(out[3].logp, sums.logp)
    assert out[3].logp.dtype == torch.bfloat16
    assert out[0].loss.isnan()
    assert out[0].logp.shape == (0, 2)
    share = mid_training.Gradient([Share([2], [7, 8], [0.0, 1.0], math.inf)])
    assert values.decode(values.encode(share), mid_training.Order) == share
    assert values.decode(values.encode(Save({"HR_SCORE": 7, "hash": "ab"})), Order) == Save(
        {"HR_SCORE": 7, "hash": "ab"}
    )
    assert values.decode(values.encode(Stop()), Order) == Stop()


def bits(dtype: str, shape: list[int], data: bytes) -> bytes:
    return msgspec.msgpack.encode([[dtype, shape], data])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", Order),
        (b"\xc1", Order),
        (pickle.dumps(Stop()), Order),
        (values.encode(Stop()) + b"\0", Order),
        (values.encode({"type": "Run", "what": "os.system"}), Order),
        (values.encode({"type": "Save", "position": {"a": [1]}}), Order),
        (values.encode({"type": "Publish", "folder": 3}), Order),
        (values.encode({"type": "Gradient", "batch": [[[1], ["x"], [1.0], 1.0]]}), mid_training.Order),
        (values.encode({1: "no hash"}), dict[int, float]),
        (b"\x81" * 5000, dict[int, bytes]),
        (bits("F32", [1 << 40], b"1234"), Tensor),
        (bits("F32", [-1], b""), Tensor),
        (bits("F32", [1 << 62, 4], b""), Tensor),
        (bits("object", [1], b"12345678"), Tensor),
        (bits("F32", [2], b"1234"), Tensor),
    ],
)
def test_other_bytes_are_refused(data: bytes, kind: Any) -> None:
    with pytest.raises(GroupError, match="from another process of the trainer's group"):
        values.decode(data, kind)


def test_a_value_that_is_no_data_is_not_sent() -> None:
    with pytest.raises(TypeError, match="got Evil"):
        values.encode(Evil(Path("unused")))
