import math
import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from headrace.algorithms.adamw import OptimizerSettings
from headrace.policy.adapters import low_rank
from headrace.policy.config import Adapter, Latent
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.seam import PolicyModel
from headrace.training.served.versions import Log, Versions
from headrace.training.state import TrainerState, squares
from tests.support.live_memory import live_bytes
from tests.support.paths import ROOT
from tests.support.world import NUMERICS, POLICY, model

IDS = torch.arange(20) % 7


def backward(net: PolicyModel, by: float = 1.0) -> None:
    logp, _ = net.selected_logprobs(net(IDS[:-1], [19]), IDS[1:], 1.0)
    torch.autograd.backward(-logp.sum() * by)


def test_float32_masters_are_the_parameters() -> None:
    state = TrainerState(model())
    parameters = dict(state.model.named_parameters())
    assert all(master is parameters[name] for name, master in state.master.items())


def test_an_update_is_adamw() -> None:
    state, twin = TrainerState(model()), model()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(3):
        backward(state.model)
        state.apply(1e-2)
        backward(twin)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in twin.named_parameters():
        assert torch.equal(state.master[name], parameter), name
    assert state.step == 3


def test_bfloat16_is_served_and_float32_remembered() -> None:
    config = msgspec.structs.replace(POLICY, dtype="bfloat16")
    state = TrainerState(Model(config, probe(config, exact=False), seed=0))
    start = {name: master.clone() for name, master in state.master.items()}
    for _ in range(4):
        backward(state.model)
        state.apply(1e-6)  # far below what bfloat16 resolves near most weights
    moved = state.master["layers.0.qkv"] - start["layers.0.qkv"]
    assert (moved != 0).float().mean() > 0.9
    served = state.model.get_parameter("layers.0.qkv")
    assert served.dtype == torch.bfloat16
    assert torch.equal(served, state.master["layers.0.qkv"].bfloat16())


def test_an_update_copies_one_parameter_at_a_time() -> None:
    state = TrainerState(model())
    state.log = Log()
    for _ in range(2):  # the first one makes the moments
        backward(state.model)
        sizes = [parameter.nbytes for parameter in state.model.parameters()]
        live = live_bytes(lambda: state.apply(1e-2))
    print(f"{live} bytes alive, {sum(sizes)} in all parameters, {max(sizes)} in the largest")
    assert live <= 2 * max(sizes) < sum(sizes) / 2, "a gradient is freed where a copy is kept"


def versions_bytes(log: Log) -> int:
    return sum(tensor.nbytes for _, entry in log.entries for tensor in entry if tensor is not None)


def test_several_updates_of_one_version_keep_one_copy_of_a_parameter() -> None:
    state = TrainerState(model())
    before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    versions, state.log = Versions(state.model, 0), Log()
    for _ in range(3):
        backward(state.model)
        state.apply(1e-2)
    names = [name for name, entry in state.log.entries if entry.positions is None]
    assert len(names) == len(set(names)) >= 10
    assert versions_bytes(state.log) < 1.5 * sum(value.nbytes for value in before.values())
    versions.advance(1, state.log)
    older = dict(versions[0].named_parameters())
    assert all(torch.equal(older[name], value) for name, value in before.items())


def eight_updates(moments: torch.dtype) -> TrainerState:
    state = TrainerState(model(), settings=OptimizerSettings(moments=moments))
    for step in range(8):
        backward(state.model, 1.0 + step % 3)
        state.apply(1e-3)
    return state


def test_eight_updates_with_moments_of_eight_bits_repeat_and_are_near_those_of_float32() -> None:
    first, again, wide = eight_updates(torch.uint8), eight_updates(torch.uint8), eight_updates(torch.float32)
    tensors = again.tensors()
    assert first.hash() == again.hash() != wide.hash()
    assert all(torch.equal(value, tensors[name]) for name, value in first.tensors().items())
    start = {name: parameter.detach() for name, parameter in model().named_parameters()}
    apart, length = (
        math.sqrt(sum(float((wide.master[n].detach() - of[n].detach()).double().square().sum()) for n in start))
        for of in (first.master, start)
    )
    print(f"relative L2 distance of eight updates: {apart / length:.4f}")
    assert apart / length < 0.05


def test_gradient_norm_and_clipping() -> None:
    state = TrainerState(model())
    backward(state.model)
    norm = state.gradient_norm()
    by_torch = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(by_torch), rel=1e-5)
    state.model.get_parameter("norm").grad = torch.full((POLICY.dim,), torch.nan)
    assert state.gradient_norm() != state.gradient_norm()


def test_squares_are_as_precise_as_in_float64() -> None:
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3 for size in (0, 1, 4096, 70_001)]
    want = sum(float(part.double().square().sum()) for part in parts)
    assert squares([*parts[:3], parts[3].view(1, -1)]) == pytest.approx(want, rel=3e-8)
    assert squares([]) == 0.0 and not math.isfinite(squares([parts[1], torch.tensor([torch.inf, 1.0])]))


def test_the_hash_follows_the_bits() -> None:
    state, other = TrainerState(model()), TrainerState(model())
    assert state.hash() == other.hash()
    backward(state.model)
    state.apply(1e-3)
    assert state.hash() != other.hash()


def test_a_float32_model_may_hold_the_numbers_of_bfloat16() -> None:
    net = model()
    net.embedding.requires_grad_(False)
    net.served_dtype = torch.bfloat16
    state = TrainerState(net)
    for _ in range(3):
        backward(net)
        state.apply(1e-5)  # below bfloat16's grid: the masters add the steps up
        assert all(torch.equal(value, value.bfloat16().float()) for value in net.state().values())
    assert any(not torch.equal(state.master[name], net.get_parameter(name)) for name in state.master)
    other = model(1)
    other.embedding.requires_grad_(False)
    other.served_dtype = torch.bfloat16
    restored = TrainerState(other)
    restored.restore(state.tensors(), version=state.version, step=state.step)
    assert restored.hash() == state.hash()


@pytest.mark.slow  # a process that imports torch
def test_an_update_does_not_import_torchs_compiler() -> None:
    """2 s of every start of a trainer."""
    script = (
        "import sys\n"
        "from headrace.training.state import TrainerState\n"
        "from tests.training.test_state import backward, model\n"
        "state = TrainerState(model())\n"
        "backward(state.model)\n"
        "state.apply(1e-3)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"experts": 0, "top_k": 0},
    "qwen3_moe": {},
    "llama": {"experts": 0, "top_k": 0, "model_type": "llama", "qk_norm": False, "tied": True},
    "qwen2": {"experts": 0, "top_k": 0, "model_type": "qwen2", "qk_norm": False, "qkv_bias": True},
    "mistral": {"experts": 0, "top_k": 0, "model_type": "mistral", "qk_norm": False},
    "glm4_moe": {"model_type": "glm4_moe", "scores": "sigmoid", "qkv_bias": True, "shared_experts": 1},
    "deepseek_v3": {
        "scores": "sigmoid", "shared_experts": 1, "dense_layers": 1, "kv_heads": 2, "head_dim": 16,
        "latent": Latent(q_rank=8, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8),
    },
    "deepseek_v3 without a rank of queries": {
        "scores": "sigmoid", "kv_heads": 2, "head_dim": 16,
        "latent": Latent(q_rank=0, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8),
    },
    "adapters": {"adapter": Adapter(rank=2, alpha=4.0, targets=("q_proj", "o_proj"))},
}  # fmt: skip
MATRICES = re.compile(r"(_proj|_proj_with_mqa|mlp\.gate|lm_head|lora_[AB])\.weight$")
SPARED = re.compile(r"norm\.weight$|bias$|embed_tokens\.weight$|e_score_correction_bias$")
"""Names of published tensors, as the architectures' own code has them."""


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weight_decay_spares_norms_biases_and_embeddings(architecture: str, moments: torch.dtype) -> None:
    config = msgspec.structs.replace(POLICY, **ARCHITECTURES[architecture])
    net = Model(config, NUMERICS, seed=0)
    for name, parameter in net.named_parameters() if config.adapter else ():
        parameter.requires_grad_(low_rank.is_adapter(name))
    state = TrainerState(net, settings=OptimizerSettings(weight_decay=0.5, moments=moments))
    names: dict[int, set[str]] = {}
    for name, view in net.views().items():
        names.setdefault(view.untyped_storage().data_ptr(), set()).add(name)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    state.apply(0.5)  # without a gradient
    moved = set()
    for name, parameter in net.named_parameters():
        published = names.pop(parameter.untyped_storage().data_ptr())
        decays = parameter.requires_grad and all(map(MATRICES.search, published))
        assert decays or not parameter.requires_grad or all(map(SPARED.search, published)), published
        assert torch.equal(parameter, torch.full_like(parameter, 0.75 if decays else 1.0)), name
        moved |= {name} if decays else set()
    assert not names and moved
