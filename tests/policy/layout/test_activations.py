"""The closed form of activations against the tensors that a layer's autograd graph saves on a CPU."""

import msgspec
import pytest
import torch
from torch import Tensor

from headrace.kernels.block_attention import Packing
from headrace.policy import attention, gpt_oss
from headrace.policy.attention import Attend
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.layer import Chosen, Layer
from headrace.policy.layout.activations import Attention, activation_bytes, score_bytes


def saved(config: PolicyConfig, index: int, tokens: int, attend: Attend) -> float:
    """Bytes per token that a layer saves, its attention included."""
    layer = Layer(config, index)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(tokens, config.dim).to(config.torch_dtype).requires_grad_()
    cos = torch.ones(tokens, 1, config.head_dim // 2, dtype=config.torch_dtype)
    input_storages = {parameter.untyped_storage()._cdata for parameter in layer.parameters()} | {
        cos.untyped_storage()._cdata
    }
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, cos, cos, attend, 1, None, Chosen())
    return sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in input_storages) / tokens


def scored(config: PolicyConfig, index: int, tokens: int) -> Attend:
    """The attention of gpt_oss over one sequence."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        assert sinks is not None
        return gpt_oss.packed(q, k, v, sinks, Packing([tokens]), 1.0, config.seen(index))

    return attend


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_scores_that_gpt_oss_keeps_are_counted(dtype: Dtype) -> None:
    config = PolicyConfig(
        dim=192, layers=2, heads=8, kv_heads=2, head_dim=32, experts=8, top_k=2, expert_dim=160, vocab=100, dtype=dtype,
        model_type="gpt_oss", qk_norm=False, qkv_bias=True, out_bias=True, window=128, clamp=7.0,
    )  # fmt: skip
    for index in (0, 1):
        told = activation_bytes(config, True) + score_bytes(config, index, 600)
        assert told == pytest.approx(saved(config, index, 600, scored(config, index, 600)), rel=0.05)


DENSE = PolicyConfig(dim=64, layers=1, heads=4, kv_heads=2, head_dim=32, experts=0, top_k=0, expert_dim=96, vocab=100)


@pytest.mark.parametrize(
    ("dtype", "length", "kind"),
    [("float32", 320, "padded"), ("bfloat16", 320, "padded"), ("bfloat16", 256, "products")],
)
def test_the_copies_that_ordinary_attention_keeps_are_counted(dtype: Dtype, length: int, kind: Attention) -> None:
    config = msgspec.structs.replace(DENSE, dtype=dtype)
    packing = Packing([length, length])

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return attention.packed(q, k, v, packing, 0.2, exact=False)

    kept = saved(config, 0, 2 * length, attend)
    assert activation_bytes(config, False, attention=kind) == pytest.approx(kept, rel=0.05)
    assert activation_bytes(config, False) < 0.95 * kept, "exact mode keeps less"
