"""Mid-training over real ranks: the same bits after a rank was killed, those of one process but for rounding, and a
rank that hangs is noticed."""

import itertools
import json
import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from headrace.config import Config, Mesh, Policy
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.training import mid_training, opening
from headrace.training.data.base import DataError
from headrace.training.mid_training import MidTrainingFailed, Progress
from headrace.training.parallel import group
from headrace.training.parallel import opening as group_opening
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.mid_training import ranks
from headrace.training.parallel.mid_training.ranks import cut
from headrace.training.parallel.mid_training.shards import Share, shares
from headrace.training.parallel.trainer import ShardedTrainer
from headrace.training.trainer import PolicyTrainer
from headrace.weights import tensor_state
from tests.support import tiny, world
from tests.support.rank_processes import group_of, joining, ranks_of
from tests.support.world import CONFIG, TOKENIZER
from tests.training.test_mid_training import Text
from tests.training.test_trainer import changed

pytestmark = pytest.mark.timeout(600)
# Every shard of four ranks has a multiple of eight elements.
DENSE = msgspec.structs.replace(world.POLICY, heads=8, kv_heads=4, head_dim=32, experts=0, top_k=0)
MIXTURE = msgspec.structs.replace(DENSE, experts=4, top_k=2)
POLICIES = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "bfloat16": msgspec.structs.replace(MIXTURE, dtype="bfloat16"),
    "mxfp8": msgspec.structs.replace(MIXTURE, dtype="bfloat16", expert_format="mxfp8"),
}


def texts() -> Iterator[Text]:
    """Unequal lengths; one of seven texts has no loss."""
    for start in itertools.count():
        ids = [300, *(20 + (start + i) % 40 for i in range(6 + start * 5 % 11))]
        yield Text(ids, [0.0 if start % 7 == 3 else 1.0 - 0.9 * (i % 3 == 1) for i in range(len(ids))])


def setting(ranks: int | Mesh, tokens: int = 600, batch: int = 60, shares: int = 2, **trainer: Any) -> Config:
    """A run with mid-training in ten steps."""
    mesh = Mesh(shard=ranks) if isinstance(ranks, int) else ranks
    return changed(
        mid_training={"tokens": tokens, "batch_tokens": batch, "learning_rate": 1e-2, "processes": shares},
        trainer={"mesh": mesh, **trainer},
    )


class Made(NamedTuple):
    """Version 0, and its mid-training."""

    hash: str
    losses: list[float]


def prepare(config: Config, folder: Path, read: Any = texts) -> Made:
    """Version 0 by the processes of a configuration, of which this one is the first."""
    seen: list[Progress] = []
    trainer = opening.prepare(config, folder, tokenizer_json=TOKENIZER, traces=read, progress=seen.append)
    try:
        return Made(trainer.state.hash(), [progress.loss for progress in seen])
    finally:
        trainer.close()


@pytest.fixture(autouse=True)
def _every_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mid_training, "REPORT_S", 0.0)


def test_micro_batches_are_consecutive_texts_of_a_share() -> None:
    parts = shares([Text(list(range(size))) for size in (5, 4, 9, 3, 3, 2)], 1)
    assert [part.lengths for part in cut(parts, 8)] == [[5, 4], [9], [3, 3, 2]]
    assert [part.lengths for part in cut(parts, 7)] == [[5, 4], [9], [3, 3, 2]]
    assert [part.lengths for part in cut(parts, 6)] == [[5], [4], [9], [3, 3, 2]]
    assert [part.lengths for part in cut(parts, 100)] == [[5, 4, 9, 3, 3, 2]]
    assert [id for part in cut(parts, 4) for id in part.ids] == parts[0].ids
    assert {part.divisor for part in cut(parts, 4)} == {parts[0].divisor}
    two = shares([Text(list(range(5))) for _ in range(8)], 2)
    assert [part.lengths for part in cut(two, 100)] == [two[0].lengths, two[1].lengths], "shares are not joined"


def test_a_micro_batch_without_a_target_is_left_out() -> None:
    parts = [Share([2, 3, 2], [1, 2, 3, 4, 5, 6, 7], [9.0, 0.0, 9.0, 0.0, 0.5, 9.0, 0.0], 0.5)]
    assert [part.ids for part in cut(parts, 1)] == [[3, 4, 5]], "the first token of a text is never a target"
    assert cut([Share([], [], [], 0.0)], 1) == []


def test_two_ranks_make_version_0_of_one_process_and_take_its_steps(tmp_path: Path) -> None:
    """Shares that are one micro-batch each: the same order of sums in one process."""
    one = prepare(setting(1, micro_tokens=64), tmp_path / "one")
    two = prepare(setting(2, micro_tokens=64), tmp_path / "two")
    assert two == one and len(one.losses) > 8
    assert one.losses[-1] < one.losses[0] - 0.3
    untrained = prepare(setting(1, tokens=0), tmp_path / "untrained")
    assert prepare(setting(2, tokens=0), tmp_path / "drawn") == untrained, "random weights are those of one process"
    assert untrained.hash != one.hash
    assert not (tmp_path / "two" / "mid-training.safetensors").exists()
    files = [tensor_state.read(tmp_path / each / "checkpoint.safetensors") for each in ("one", "two")]
    assert files[0].keys() == files[1].keys(), "no moment of mid-training is left"
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


class Killed(Exception):
    """The rank that was to be killed was there."""


def killing(after: int, number: int = signal.SIGKILL) -> Iterator[Text]:
    """A rank is sent a signal when so many texts were read."""
    yield from itertools.islice(texts(), after)
    (rank,) = ranks_of()
    os.kill(rank, number)
    yield from itertools.islice(texts(), after, None)


@pytest.mark.slow
def test_a_killed_rank_ends_the_group_and_the_next_one_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mid_training, "KEEP_S", 0.0)
    monkeypatch.setattr(mid_training, "KEEP_SHARE", math.inf)
    config = setting(2, micro_tokens=20)
    file = tmp_path / "killed" / "mid-training.safetensors"
    whole = prepare(config, tmp_path / "whole")
    with pytest.raises(GroupError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        prepare(config, tmp_path / "killed", partial(killing, 30))
    assert file.exists() and not (tmp_path / "killed" / "checkpoint.safetensors").exists()
    other = msgspec.structs.replace(config.mid_training, learning_rate=2e-2)
    with pytest.raises(MidTrainingFailed, match=r"another \[mid_training\]"):
        prepare(msgspec.structs.replace(config, mid_training=other), tmp_path / "killed")
    again = prepare(config, tmp_path / "killed")
    assert again.hash == whole.hash
    assert 0 < len(again.losses) < len(whole.losses), "it did not begin again"
    assert again.losses == whole.losses[-len(again.losses) :]
    assert not file.exists()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_group(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match="no exchange of the ranks ended within 3 s"):
        prepare(setting(2, stall_s=3.0), tmp_path, partial(killing, 30, signal.SIGSTOP))


def overflowing() -> Iterator[Text]:
    """A loss that is not finite, in the fifth batch or later."""
    yield from itertools.islice(texts(), 30)
    yield Text([300, 20, 21], [1.0, math.inf, 1.0])
    yield from texts()


def unreadable() -> Iterator[Text]:
    """A reader of data raises while the ranks compute."""
    yield from itertools.islice(texts(), 30)
    raise DataError("a.jsonl, line 31: expected str")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "error", "says"),
    [
        (overflowing, MidTrainingFailed, r"step \d+: loss nan, gradient norm nan"),
        (unreadable, DataError, r"a\.jsonl, line 31"),
    ],
)
def test_what_the_first_process_raises_ends_the_group_as_it_is(
    read: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        prepare(setting(2), tmp_path, read)
    assert not ranks_of()


def rank(arguments: str) -> None:
    """A process of a group: join, mid-train, and print hash and losses."""
    number, config, folder, _, store = joining(arguments)
    mid_training.REPORT_S = 0.0
    losses: list[float] = []

    def lead(trainer: ShardedTrainer, source: Path | None) -> None:
        ranks.lead(trainer, source, texts(), lambda p: losses.append(p.loss))

    begin = group_opening.Beginning(config.policy.checkpoint, True) if number == 0 else None
    learn = ranks.follow if number else lead
    trainer = group_opening.joined(config, folder, number, store, begin, learn)
    print(json.dumps({"hash": trainer.state.hash(), "losses": losses}), flush=True)
    del trainer
    group.leave()


def over(config: Config, folder: Path) -> Made:
    """A group of processes makes version 0 in `folder`, where all nodes are on this machine."""
    every = group_of("tests.training.parallel.mid_training.test_ranks", config, folder)
    assert len({each["hash"] for each in every}) == 1
    return Made(every[0]["hash"], every[0]["losses"])


def of(config: Config, folder: Path, policy: PolicyConfig, **algorithm: Any) -> Config:
    """The configuration with a policy that is read from a folder, which is written at the first call."""
    if not folder.exists():
        plain = msgspec.structs.replace(policy, expert_format="")
        checkpoint.save(folder, Model(plain, tiny.numerics(plain), seed=1), plain)
    section = Policy(checkpoint=str(folder), expert_format=policy.expert_format)
    return msgspec.structs.replace(
        config, policy=section, algorithm=msgspec.structs.replace(CONFIG.algorithm, **algorithm)
    )


def masters(folder: Path) -> dict[str, Tensor]:
    held = tensor_state.read(folder / "checkpoint.safetensors")
    return {name: value for name, value in held.items() if name.startswith("master.")}


def change(folder: Path, other: Path, first: Path) -> float:
    """Relative L2 distance of two versions: that of the updates which lead to them from `first`."""
    start, one, two = masters(first), masters(folder), masters(other)
    apart = sum(float((one[name] - two[name]).double().square().sum()) for name in start)
    return math.sqrt(apart / sum(float((one[name] - start[name]).double().square().sum()) for name in start))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, Mesh(shard=2)) for name in POLICIES), ("dense", Mesh(replicate=2))]
)
def test_a_batch_of_one_micro_batch_makes_version_0_of_one_process(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """The second rank takes part and adds zeros. Owners of experts would multiply its rows with those of the first."""
    alone = of(setting(1, shares=1, micro_tokens=128), tmp_path / "model", POLICIES[name])
    one = prepare(alone, tmp_path / "one")
    section = msgspec.structs.replace(alone.trainer, mesh=mesh)
    assert over(msgspec.structs.replace(alone, trainer=section), tmp_path / "two") == one


class Way(NamedTuple):
    """Divisions of the work, which round otherwise."""

    policy: str
    divisions: tuple[Mesh, ...]
    apart: float
    """Bound on the distance from one process, relative to the update."""
    moments: str = "float32"


WAYS = {
    "mixture": Way("mixture", (Mesh(shard=2), Mesh(replicate=2)), 1e-5),
    "dense": Way("dense", (Mesh(shard=2), Mesh(replicate=2, shard=2)), 1e-5),
    "bfloat16": Way("bfloat16", (Mesh(shard=2), Mesh(shard=4)), 0.05),
    "mxfp8": Way("mxfp8", (Mesh(shard=2),), 0.15),
    "owned": Way("mixture", (Mesh(shard=2, expert=2), Mesh(shard=4, expert=2)), 1e-5),
    "eight_bits": Way("dense", (Mesh(shard=2),), 0.05, "eight_bit"),
    "context": Way("mixture", (Mesh(shard=2, context=2), Mesh(shard=4, context=2)), 1e-5),
}
"""One process adds gradients of shares in the policy's dtype, and keeps moments in float32."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_ranks_make_the_same_version_0_and_others_round_otherwise(way: str, tmp_path: Path) -> None:
    """Several micro-batches for each rank, and a last round that is not full."""
    policy, divisions, most, moments = WAYS[way]
    made = []
    for number, division in enumerate((*divisions, divisions[0])):
        config = setting(division, micro_tokens=16)
        config = of(config, tmp_path / "model", POLICIES[policy], moments=moments)
        made.append(over(config, tmp_path / f"ranks{number}"))
    assert made[-1] == made[0]
    assert made[0].losses[-1] < made[0].losses[0] - 0.1
    for tokens, folder in ((0, "first"), (600, "one")):
        config = of(setting(1, tokens=tokens), tmp_path / "model", POLICIES[policy], moments=moments)
        PolicyTrainer.prepare(config, tmp_path / folder, tokenizer_json=TOKENIZER, traces=texts).close()
    for number in range(len(divisions)):
        assert 0.0 < change(tmp_path / "one", tmp_path / f"ranks{number}", tmp_path / "first") < most
