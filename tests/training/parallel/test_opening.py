"""Version 0 over ranks: each reads its rows of an imported policy's files, or draws those of a new one, and the hash is
that of one process."""

import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headrace.config import Config, Mesh, Policy
from headrace.config.training import Data, Phase
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.layout.pieces import Pieces
from headrace.policy.model import Model
from headrace.training import memory_plan
from headrace.training.device import TrainerError
from headrace.training.figures.layout import layout_of
from headrace.training.parallel import group, opening, rows
from headrace.training.parallel.interface import GroupError
from headrace.training.trainer import PolicyTrainer
from headrace.weights import snapshot
from tests.support import tiny
from tests.support.rank_processes import group_of, joining, ranks_of
from tests.support.world import CONFIG, TOKENIZER

DENSE = PolicyConfig(
    dim=128, layers=6, heads=4, kv_heads=4, head_dim=32, experts=0, top_k=0, expert_dim=256, vocab=512, tied=True
)
MIXTURE = msgspec.structs.replace(
    DENSE, dtype="bfloat16", experts=8, top_k=2, expert_dim=64, tied=False, scores="sigmoid", shared_experts=1,
    dense_layers=1, dense_dim=256, model_type="glm4_moe",
)  # fmt: skip
POLICIES = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "mxfp8": msgspec.structs.replace(MIXTURE, expert_format="mxfp8"),
    "few": msgspec.structs.replace(MIXTURE, experts=2, expert_format="mxfp8"),
}
EVEN = ("dense", "mixture", "mxfp8")
"""Those whose experts four ranks share evenly without owners."""
NEW = Policy(
    dim=128, layers=6, heads=4, kv_heads=4, head_dim=32, experts=8, top_k=2, expert_dim=64, vocab=512, dtype="bfloat16"
)  # fmt: skip
NEW_POLICIES = {
    "bfloat16": NEW,
    "float32": msgspec.structs.replace(NEW, dtype="float32"),
    "mxfp8": msgspec.structs.replace(NEW, expert_format="mxfp8"),
}


def setting(folder: Path, ranks: int) -> Config:
    """A run that imports the folder's policy."""
    section = msgspec.structs.replace(CONFIG.trainer, mesh=Mesh(shard=ranks))
    return msgspec.structs.replace(
        CONFIG,
        policy=Policy(checkpoint=str(folder)),
        trainer=section,
        mid_training=msgspec.structs.replace(CONFIG.mid_training, tokens=0),
        engine=msgspec.structs.replace(CONFIG.engine, exact=False),
    )


def saved(folder: Path, policy: PolicyConfig) -> int:
    """Write a checkpoint in several files; returns the bytes of the tensors that a run reads."""
    plain = msgspec.structs.replace(policy, expert_format="")
    model = Model(plain, tiny.numerics(plain), seed=1)
    tensors = model.state()
    size = sum(tensor.nbytes for tensor in tensors.values())
    if policy.tied:
        tensors["lm_head.weight"] = torch.zeros(1)  # what a run leaves out
    checkpoint.save(folder, tensors, plain, shard_bytes=size // 5)
    assert len(list(folder.glob("*.safetensors"))) > 4
    return size


def rank(arguments: str) -> None:
    """A rank of a group: join, and print hash, bytes read and peak of live tensor bytes."""
    number, config, folder, begin, store = joining(arguments)
    rows.ROUND_BYTES = 1 << 16  # as small beside this policy as it is beside a large one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        first = opening.Beginning(begin) if number == 0 else None
        trainer = opening.joined(config, folder, number, store, first)
    assert watched.profiler is not None
    events = watched.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    peak = int(max(itertools.accumulate(sizes)))
    print(json.dumps({"hash": trainer.state.hash(), "read": trainer.read_bytes, "peak": peak}), flush=True)
    group.leave()


def one_process(config: Config, folder: Path) -> tuple[str, int]:
    """Version 0 of one process: its hash, and the bytes of its masters."""
    trainer = PolicyTrainer.prepare(config, folder, tokenizer_json=TOKENIZER, traces=tuple)
    made = trainer.state.hash(), sum(master.nbytes for master in trainer.state.master.values())
    trainer.close()
    return made


class Division(NamedTuple):
    """A division of the work."""

    shard: int
    replicate: int = 1
    node_ranks: int = 0
    expert: int = 1

    @property
    def processes(self) -> int:
        return self.shard * self.replicate

    @property
    def near(self) -> int:
        """Processes of a copy that see node 0's files."""
        return min(self.shard, self.node_ranks or self.shard)

    def of(self, config: Config) -> Config:
        mesh = Mesh(replicate=self.replicate, shard=self.shard, expert=self.expert)
        section = msgspec.structs.replace(config.trainer, mesh=mesh, node_ranks=self.node_ranks)
        return msgspec.structs.replace(config, trainer=section)


def over(config: Config, folder: Path, begin: Path | None) -> list[dict[str, Any]]:
    """A group makes version 0 in `folder`, from a checkpoint or from random weights; the figures of each rank."""
    return group_of("tests.training.parallel.test_opening", config, folder, str(begin or ""))


@pytest.mark.parametrize(
    ("name", "divisions"),
    [
        ("mixture", (Division(2, node_ranks=1),)),
        *(pytest.param(name, (Division(1), Division(2), Division(4)), marks=pytest.mark.slow) for name in EVEN),
        *(pytest.param(name, (Division(4, node_ranks=2),), marks=pytest.mark.slow) for name in EVEN),
        pytest.param("mixture", (Division(2, 2, 2), Division(2, 2, 1)), marks=pytest.mark.slow),
        pytest.param("few", (Division(4, expert=2), Division(4, 1, 2, 2)), marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_its_rows_and_version_0_is_that_of_one_process(
    name: str, divisions: tuple[Division, ...], tmp_path: Path
) -> None:
    policy = POLICIES[name]
    size = saved(tmp_path / "model", policy)
    alone = setting(tmp_path / "model", 1)
    if policy.expert_format:
        alone = msgspec.structs.replace(alone, policy=msgspec.structs.replace(alone.policy, expert_format="mxfp8"))
    want, masters = one_process(alone, tmp_path / "one")
    for number, division in enumerate(divisions):
        told = over(division.of(alone), tmp_path / f"ranks{number}", tmp_path / "model")
        assert [each["hash"] for each in told] == [want] * division.processes
        # Corrections of routers are read for every rank; other nodes and copies are sent what node 0 reads.
        read, shard, near = [each["read"] for each in told], division.shard, division.near
        assert sum(read[:near]) == pytest.approx(size, rel=0.01) and read == [*read[:near], *[0] * (shard - near)] * (
            division.replicate
        )
        assert max(read) <= 1.01 * size / near
        if shard > 1:
            # Its rows, and for a moment a layer and a mapped file, which are large parts of so small a model.
            assert max(each["peak"] for each in told) < masters * (1 / shard + 0.45), "no rank held the whole model"
        files = [snapshot.Snapshot(tmp_path / each / "checkpoint.safetensors") for each in ("one", f"ranks{number}")]
        assert files[0].metadata == files[1].metadata and files[0].state_hash() == files[1].state_hash()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_while_it_loads_the_checkpoint_ends_the_group(tmp_path: Path) -> None:
    """Before, it was waited for thirty days."""
    saved(tmp_path / "model", DENSE)
    config = setting(tmp_path / "model", 1)
    PolicyTrainer.prepare(config, tmp_path / "whole", tokenizer_json=TOKENIZER, traces=tuple).close()
    (tmp_path / "stuck").mkdir()
    os.mkfifo(tmp_path / "stuck" / "checkpoint.safetensors")  # who opens it waits for a writer
    folder = tmp_path / "checkpoints"
    folder.symlink_to(tmp_path / "stuck")

    def waiting(_: str) -> None:
        """Rank 1 has got the resolved name already."""
        folder.unlink()
        folder.symlink_to(tmp_path / "whole")

    two = msgspec.structs.replace(
        config, trainer=msgspec.structs.replace(config.trainer, mesh=Mesh(shard=2), stall_s=10.0)
    )
    with pytest.raises(GroupError, match="no exchange of the ranks ended within 10 s: the log has the stacks") as told:
        opening.open_ranks(two, folder, tokenizer_json=TOKENIZER, traces=tuple, waiting=waiting)
    assert told.value.alike == "the opening of its ranks: no exchange of the ranks ended within 10 s"
    assert ranks_of() == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.norm.weight": None}, "1 tensors are missing and 0 are not of this model; the first is model.norm"),
        ({"more": torch.zeros(2)}, "0 tensors are missing and 1 are not of this model; the first is more"),
        ({"model.norm.weight": torch.zeros(9)}, r"model.norm.weight: expected shape \[128\], got \[9\]"),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.zeros(128, 9)},
            r"expected shape \[128, 128\], got \[128, 9\]",
        ),
    ],
)
def test_another_models_checkpoint_is_refused_as_in_one_process(
    change: dict[str, torch.Tensor | None], says: str, tmp_path: Path
) -> None:
    model = Model(DENSE, tiny.numerics(DENSE), seed=1)
    tensors: dict[str, torch.Tensor | None] = {**model.state(), **change}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    checkpoint.save(tmp_path, left, DENSE, shard_bytes=1 << 20)
    shapes = {name: tuple(view.shape) for name, view in model.views().items()}
    with pytest.raises(CheckpointError, match=says):
        Pieces(DENSE, tmp_path, shapes)
    with pytest.raises(CheckpointError, match=says):
        model.load_state(checkpoint.load(tmp_path)[1])
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        Pieces(DENSE, tmp_path, shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "divisions"),
    [
        ("bfloat16", (Division(2, node_ranks=1),)),
        *((name, (Division(2), Division(4), Division(2, 2))) for name in NEW_POLICIES),
    ],
)
def test_each_rank_draws_its_rows_of_a_new_policy_and_version_0_is_that_of_one_process(
    name: str, divisions: tuple[Division, ...], tmp_path: Path
) -> None:
    alone = msgspec.structs.replace(setting(tmp_path, 1), policy=NEW_POLICIES[name])
    want, masters = one_process(alone, tmp_path / "one")
    for number, division in enumerate(divisions):
        told = over(division.of(alone), tmp_path / f"ranks{number}", None)
        assert [each["hash"] for each in told] == [want] * division.processes
        if division.shard > 1:
            # Its rows, and for a moment a whole parameter and a layer, which are large parts of so small a model.
            peak = max(each["peak"] for each in told)
            assert peak < masters * (1 / division.shard + 0.45), "no rank held the whole model"
        files = [snapshot.Snapshot(tmp_path / each / "checkpoint.safetensors") for each in ("one", f"ranks{number}")]
        assert files[0].metadata == files[1].metadata and files[0].state_hash() == files[1].state_hash()


@pytest.mark.parametrize("tokens", [0, 1000])
def test_a_new_policy_needs_the_memory_of_its_ranks(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.training.device.available_bytes", lambda where: 1 << 20)
    monkeypatch.setattr(memory_plan, "FREED_S", 0.0)
    learning = msgspec.structs.replace(CONFIG.mid_training, tokens=tokens)
    section = msgspec.structs.replace(CONFIG.trainer, mesh=Mesh(shard=2))
    config = msgspec.structs.replace(CONFIG, trainer=section, mid_training=learning)
    with pytest.raises(TrainerError, match=r"the trainer needs 0\.\d GiB and its device has 0\.0 GiB free"):
        opening.open_ranks(config, tmp_path, tokenizer_json=TOKENIZER, traces=tuple)


def test_the_plan_counts_the_longest_sequence_of_mid_training_in_ordinary_mode() -> None:
    data = (Data(kind="text", path="code"),)
    recipe = msgspec.structs.replace(CONFIG.mid_training, sequence=128, phases=(Phase(start=0.5, sequence=4096),))
    for source, tokens in (((), 64), (data, 4096)):
        config = msgspec.structs.replace(CONFIG, mid_training=msgspec.structs.replace(recipe, data=source))
        learning = opening._learning(config)
        assert (learning.trainer.micro_tokens, learning.engine.exact) == (tokens, False)
    shape = hugging_face.of_run(config)
    assert memory_plan.plan(shape, layout_of(learning)).training > memory_plan.plan(shape, layout_of(config)).training
