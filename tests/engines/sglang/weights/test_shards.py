"""Checksums of a server with four tensor-parallel ranks, or groups of them that share the experts: each rank's part is
compared."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from torch import Tensor

from headrace.engines.base import EngineError
from headrace.engines.server.weights.checksums import Ranks, fused, unknown
from headrace.policy.config import PolicyConfig
from tests.support import tiny
from tests.support.engines import Versions
from tests.support.sglang import opening
from tests.support.sglang.double import Double
from tests.support.sglang.requests import attached

pytestmark = pytest.mark.anyio

RANKS = 4
MIXTURE = msgspec.structs.replace(tiny.config(), heads=8, kv_heads=2, expert_dim=24)
DENSE = msgspec.structs.replace(MIXTURE, experts=0, top_k=0, kv_heads=4)
LLAMA = msgspec.structs.replace(DENSE, model_type="llama", qk_norm=False, tied=True)
SHAPES = {"mixture": MIXTURE, "dense": DENSE, "llama": LLAMA}


def part(name: str, whole: Tensor, config: PolicyConfig, rank: int, groups: int) -> Tensor:
    """A rank's part of a fused tensor, as SGLang's parallel layers cut it. groups: of ranks, each with some experts."""
    if ".experts." in name:
        members, experts = RANKS // groups, len(whole) // groups
        run = whole[rank // members * experts :][:experts]
        width, first = config.expert_dim // members, rank % members * (config.expert_dim // members)
        if "w2_weight" in name:
            return run[:, :, first : first + width]
        second = first + config.expert_dim
        return torch.cat([run[:, first : first + width], run[:, second : second + width]], 1)
    inner, heads, head = config.expert_dim // RANKS, config.heads // RANKS, config.head_dim
    if "qkv_proj" in name:
        kv = max(1, config.kv_heads // RANKS) * head
        keys = config.heads * head + rank * config.kv_heads // RANKS * head
        values = keys + config.kv_heads * head
        rows = [(rank * heads * head, heads * head), (keys, kv), (values, kv)]
        return torch.cat([whole[first : first + count] for first, count in rows])
    if "o_proj" in name:
        return whole[:, rank * heads * head : (rank + 1) * heads * head]
    if "gate_up_proj" in name:
        gate, up = torch.split(whole, config.expert_dim)
        return torch.cat([half[rank * inner : (rank + 1) * inner] for half in (gate, up)])
    if "down_proj" in name:
        return whole[:, rank * inner : (rank + 1) * inner]
    if "embed_tokens" in name or "lm_head" in name:
        rows_of_rank = len(whole) // RANKS
        return whole[rank * rows_of_rank : (rank + 1) * rows_of_rank]
    return whole


class Sharded(Double):
    """Reports checksums of its four ranks, in any order."""

    def __init__(self, config: PolicyConfig, device: str, groups: int = 1) -> None:
        super().__init__(config)
        self.info = {"tp_size": RANKS, "ep_size": groups, "device": device}
        self.groups = groups
        digest = opening.backend(config).digest(device, 1)
        assert digest is not None
        self.digest = digest
        self.reported = [2, 0, 3, 1]
        self.spoilt: tuple[int, str] | None = None

    async def _check(self, request: web.Request) -> web.Response:
        whole = fused(self.model.state(), self.config)
        ranks: list[dict[str, Any]] = []
        for rank in self.reported:
            sums = {name: self.digest(self._part(name, whole[name], rank)) for name in whole}
            if self.spoilt is not None and self.spoilt[0] == rank:
                sums[self.spoilt[1]] = "0" * 16
            ranks.append({"checksums": sums, "parallelism_info": [{"tp_rank": rank, "tp_size": RANKS}]})
        return web.json_response({"success": True, "message": "", "ranks": ranks})

    def _part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        return part(name, whole, self.config, rank, self.groups)


@pytest.mark.parametrize(
    ("shape", "device", "groups"),
    [
        *(("mixture", "cpu", 1), ("mixture", "cpu", 2), ("mixture", "cpu", 4), ("mixture", "cuda", 1)),
        *(("mixture", "cuda", 2), ("dense", "cpu", 1), ("llama", "cpu", 1)),
    ],
)
async def test_every_rank_must_hold_its_part_of_the_version(
    tmp_path: Path, shape: str, device: str, groups: int
) -> None:
    config = SHAPES[shape]
    versions = Versions(config, tmp_path, exact=False)
    double = Sharded(config, device, groups)
    async with attached(versions, tmp_path, double=double) as (engine, _):
        assert engine.stats()["checked"], "version 0 was compared"
        await versions.load(engine, 1)
        assert engine.stats()["checked"] and engine.version == 1
        double.fail_updates = ["lie"]
        with pytest.raises(EngineError, match=r"tensors in the server differ from the version's; rank 0: "):
            await versions.load(engine, 0)
        assert engine.version == 1


@pytest.mark.parametrize(("fault", "device"), [("tensor", "cpu"), ("rank", "cpu"), ("tensor", "cuda")])
async def test_one_wrong_rank_is_found(tmp_path: Path, fault: str, device: str) -> None:
    versions = Versions(MIXTURE, tmp_path, exact=False)
    double = Sharded(MIXTURE, device)
    async with attached(versions, tmp_path, double=double) as (engine, _):
        if fault == "tensor":
            double.spoilt = 2, "model.layers.1.self_attn.qkv_proj.weight"
            why = "1 of .* differ .*; rank 2: model.layers.1.self_attn.qkv_proj.weight has other bits"
        else:
            double.reported, why = [0, 1, 2], "expected 4 ranks, got 3"
        with pytest.raises(EngineError, match=why):
            await versions.load(engine, 1)


async def test_a_load_without_checksums_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    versions = Versions(tiny.config(), tmp_path, exact=False)
    double = Double(versions.config)
    double.info = {"tp_size": 3}
    async with attached(versions, tmp_path, double=double) as (engine, _):
        await versions.load(engine, 1)
        stats = engine.stats()
        assert not stats["checked"] and stats["unchecked"] == 1 and not double.bodies("/weights_checker")
    (said,) = [record.getMessage() for record in caplog.records if "not compared" in record.getMessage()]
    assert "for 3 tensor-parallel ranks, which do not divide" in said and double.url in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"qkv_bias": True}, "biases of attention"),
        ({"shared_experts": 1}, "shared experts"),
        ({"dense_layers": 1}, "dense layers beside a mixture"),
        ({"expert_format": "mxfp8", "dim": 64, "expert_dim": 64}, "experts in mxfp8"),
        ({"model_type": "mistral"}, "the architecture mistral"),
    ],
)
def test_a_model_without_known_checksums_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert unknown(msgspec.structs.replace(MIXTURE, **changes)) == reason


def test_ranks_that_do_not_divide_the_experts_have_a_reason() -> None:
    assert not unknown(MIXTURE, Ranks(4, 4)) and not unknown(MIXTURE, Ranks(4, 2))
    six = msgspec.structs.replace(MIXTURE, experts=6)
    assert unknown(six, Ranks(4, 4)) == "4 groups of ranks, which do not divide 6 experts" and not unknown(
        six, Ranks(4, 2)
    )
    assert "groups of ranks, which do not divide 0 experts" in unknown(DENSE, Ranks(4, 2))
    assert "do not divide the model's heads" in unknown(MIXTURE, Ranks(4, 3))
