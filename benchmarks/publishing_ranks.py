"""One process of a group that publishes a large mixture in one way: part of `python -m benchmarks.publishing`.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python benchmarks/publishing_ranks.py WAY FOLDER LAYERS

It runs on this tree or, with another PYTHONPATH, on an earlier commit's; so it imports what each way needs, and nothing
of `benchmarks`. Ways: `gathered` (commit 195c96d: whole tensors in every process, written by the first one), `rows`
(commit 3d9a1d7: each process hashes its rows, then writes them and waits for the disk) and `behind` (this tree: hashed
while copied, in a thread). Weights are the same function of name and position in all of them.
"""

import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHAPE: dict[str, Any] = {
    "dim": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "experts": 16, "top_k": 2, "expert_dim": 768,
    "vocab": 151936, "dtype": "bfloat16", "tied": True,
}  # fmt: skip
PIECE = 1 << 22


def fill(rows: dict[str, torch.Tensor], starts: dict[str, int]) -> None:
    """Set every parameter's rows from its name's place in the sorted names and from each element's flat position."""
    for index, name in enumerate(sorted(rows)):
        flat = rows[name].view(-1)
        for at in range(0, len(flat), PIECE):
            count = min(PIECE, len(flat) - at)
            place = torch.arange(starts[name] + at, starts[name] + at + count)
            flat[at : at + count] = ((place * (2 * index + 3)) % 65521).float() * 1e-5


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Peak:
    """The largest `anonymous` while it runs, every 4 ms."""

    def __init__(self) -> None:
        self.before = self.most = anonymous()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.004):
            self.most = max(self.most, anonymous())

    def added(self) -> int:
        """End; bytes above the first reading."""
        self._end.set()
        self._thread.join()
        return max(self.most, anonymous()) - self.before


def gathered(folder: Path, layers: int) -> Callable[[], str]:
    """The way of 195c96d."""
    from headrace.policy.config import PolicyConfig  # an earlier headrace
    from headrace.policy.model import Model
    from headrace.policy.numerics import Numerics

    distributed: Any = importlib.import_module("headrace.training.distributed")
    numerics = Numerics(exact=False, row_pad=1, reason="", fingerprint="")
    world = distributed.start()
    model = Model(PolicyConfig(layers=layers, **SHAPE), numerics, seed=None)
    whole = {name: parameter.data for name, parameter in model.named_parameters()}
    fill(whole, dict.fromkeys(whole, 0))
    del whole
    distributed.shard(model, world)
    state = distributed.ShardedState.__new__(distributed.ShardedState)
    state.model = model  # all that publishing uses
    return lambda: str(distributed.publish(state, world, folder / "v1.safetensors"))


def sharded(layers: int) -> Any:
    """A state of this tree, or of the earlier one; every process holds its rows of it."""
    from headrace.policy.config import PolicyConfig
    from headrace.policy.numerics import Numerics
    from headrace.training.parallel import group, sharding
    from headrace.training.parallel.state import ShardedState

    cpu = torch.device("cpu")
    group.join(cpu, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    world = group.ProcessGroup(cpu)
    numerics = Numerics(exact=False, row_pad=1, reason="", fingerprint="")
    held = sharding.build(PolicyConfig(layers=layers, **SHAPE), numerics, world)
    fill(held.local, {name: held.first[name] * torch.Size(held.shapes[name][1:]).numel() for name in held.local})
    return ShardedState(held, world)


def rows(folder: Path, layers: int) -> Callable[[], str]:
    """The way of the tree before."""
    from headrace.training.parallel import published
    from headrace.training.parallel import rows as parallel_rows

    state = sharded(layers)

    def publish() -> str:
        described = published.infos(state.model.config, state.sharded.shapes)
        digest: str = state.hash()
        parallel_rows.write(folder / "v1.safetensors", described, {"state_hash": digest}, state.runs(), state.world)
        return digest

    return publish


def behind(folder: Path, layers: int) -> Callable[[], str]:
    """The way of this tree; the caller waits for the file here, as a step would not."""
    state = sharded(layers)

    def publish() -> str:
        publication = state.publish(folder)
        publication.durable.result()
        return str(publication.hashed.result())

    return publish


def main() -> None:
    """Publish once; print seconds, added bytes and the hash."""
    torch.set_num_threads(1)
    way, folder, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    publish = {"gathered": gathered, "rows": rows, "behind": behind}[way](folder, layers)
    gc.collect()
    dist.barrier()
    if os.environ["RANK"] == "0":
        os.sync()  # what others have written does not count
    dist.barrier()
    peak, began = Peak(), time.perf_counter()
    digest = publish()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "added_bytes": peak.added(), "hash": digest}), flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo may abort an interpreter that ends


if __name__ == "__main__":
    main()
