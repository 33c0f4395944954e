"""Bytes of activations that a layer saves and of temporary tensors of its backward pass, in closed form, without torch.

Each term is a tensor. `training.memory_plan` adds them up; its tests compare them with the meta device and with live
tensors on a CPU.
"""

from typing import Literal

from headrace.policy.adapters import shape
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import element_bytes

_BLOCK = 64
"""Keys of a block, `kernels.block_attention.BLOCK`."""
_SHORT = 256
"""Keys up to which ordinary mode takes plain products for bfloat16 on a CPU, `policy.attention`."""
Attention = Literal["fused", "blocks", "padded", "products"]
"""How packed sequences attend.

fused: one kernel that keeps queries, keys, values, its output and a log-sum-exp: Triton's, or `varlen_attn`. blocks:
exact mode on a CPU, whose backward pass holds a block's scores. padded: torch's fused attention over copies with
padding. products: as padded, but short sequences keep their probabilities instead.
"""


def activation_bytes(
    config: PolicyConfig, sparse: bool, context: int = 1, attention: Attention = "fused", owned: bool = False
) -> int:
    """Bytes per token that one layer saves for backward, without `score_bytes`.

    context: devices that share a sequence. The bytes are then per token of one device, and attention's output counts
    twice, because it is kept by heads and by tokens. owned: other devices may have a token's experts, so the rows that
    a device gets are kept; as many as it sends.

    Each term is a saved tensor: inputs of norms and products, rotated queries and keys, values, attention's output and
    log-sum-exp, the MLP's inner width, and in float32 what norms and routing keep per row. An adapter saves the outputs
    of its A; the inputs of fixed weights stay counted, although few of them are saved then.
    """
    c, size = config, element_bytes(config)
    wide, row = 4 * c.dim, 2  # both norms' inputs and outputs; both norms' scales
    if c.latent:
        low, head = c.latent, c.latent.nope_dim + c.latent.rope_dim
        wide += 4 * c.heads * head + c.heads * low.value_dim + 2 * low.kv_rank + 2 * low.q_rank
        row += 1 + c.heads + (1 if low.q_rank else 0)
    else:
        wide += 2 * (c.heads + c.kv_heads) * c.head_dim  # queries, keys, values, the output
        row += c.heads
        if c.qk_norm:  # normalising queries and keys keeps the whole product
            wide += (c.heads + 2 * c.kv_heads) * c.head_dim
            row += c.heads + c.kv_heads
    if c.gpt_oss:  # copies of queries, keys, values and the output by sequence; the output in float32, its totals
        wide += 2 * (c.heads + c.kv_heads) * c.head_dim
        row += c.heads * (c.head_dim + 1)
    copied = attention in ("padded", "products") and not c.gpt_oss
    if (context > 1 or copied) and not c.latent:  # latent values are cut out of the output in any case
        wide += c.heads * c.head_dim
    if attention == "products" and not c.gpt_oss:
        wide += c.heads * max(0, _SHORT - c.head_dim)
    if c.adapter:
        wide += len(shape.targeted(c, 0)) * c.adapter.rank
    if not sparse:
        return size * (wide + 3 * (c.dense_dim or c.expert_dim)) + 4 * row
    if c.gpt_oss:  # autograd differentiates the experts: their input rows, nine inner tensors, the output in float32
        wide += c.top_k * (9 * c.expert_dim + c.dim)
        row += c.top_k * c.dim
    else:
        wide += c.top_k * 2 * c.expert_dim + 3 * c.shared_experts * c.expert_dim
    if owned:  # the rows that came; their gate, expert and place, and the places of those that were sent, in int64
        wide += c.top_k * c.dim
        row += c.top_k * 7
    row += c.experts + 4 * c.top_k + 1  # scores; experts as int64, two tensors of gates; their sum
    if c.scores == "sigmoid":
        row += 3 * c.experts + (c.dim if c.dtype != "float32" else 0)  # the router's product is float32
    if c.expert_format:
        wide += c.dim  # the rounded input of the experts
    return size * wide + 4 * row


def temporary_bytes(config: PolicyConfig, sparse: bool, attention: Attention = "fused", owned: bool = False) -> int:
    """Bytes per token of the temporary tensors that the backward pass of one layer holds at once.

    Of the experts: their gathered rows and the gradients of their inner width, each until its last use; of a dense MLP
    five inner widths, less the one that the second product saved. Of attention: gradients and copies of queries, keys
    and values; with `blocks` the scores of 64 keys and their gradients, with `products` those of a short sequence. The
    MLP's activations are freed before. Three gradients of the hidden state are alive in both.
    """
    c, size = config, element_bytes(config)
    inner, k = c.expert_dim if sparse else c.dense_dim or c.expert_dim, c.top_k if sparse else 1
    wide = (
        4 if size == 4 else 8
    )  # bytes of a float32 copy and a product of it; the copy is the tensor itself in float32
    mlp = size * k * max(5 * inner, 2 * (c.dim + inner)) if sparse else size * 4 * inner
    if sparse:
        mlp = max(mlp, size * k * (c.dim + 2 * inner) + wide * k * inner)
        if owned:  # the gradients of the rows, as they come and as they go back
            mlp += 2 * size * k * c.dim
    freed = size * (2 * c.dim + (2 if sparse else 3) * k * inner) + 4 * (c.experts + 4 * k if sparse else 0)
    head = c.latent.nope_dim + c.latent.rope_dim if c.latent else c.head_dim
    attending = size * head * (2 * c.heads + 4 * c.kv_heads)
    if attention == "products":
        attending += (size + 3 * 4) * _SHORT * c.heads  # the probabilities' gradient, and three tensors in float32
    if attention == "blocks":
        attending = head * (size * (4 * c.heads + 6 * c.kv_heads) + 4 * c.heads) + 2 * wide * _BLOCK * c.heads
    return max(mlp, attending - freed) + 3 * size * c.dim


def score_bytes(config: PolicyConfig, layer: int, tokens: int) -> int:
    """Bytes per token that a layer's attention saves for backward, in one sequence of `tokens`: 0 where it is fused.

    gpt_oss has no fused attention here. For each block of 64 keys that is not left out, masked keys included, a query
    saves its probabilities in float32 and, where that is another one, in the policy's dtype, a factor, and the mask.
    """
    c, window = config, config.seen(layer)
    if not c.gpt_oss:
        return 0
    blocks = 0  # for each query of a sequence
    for first in range(0, tokens, _BLOCK):
        seen = first // _BLOCK + 1 - (max(0, first - window + 1) // _BLOCK if window else 0)
        blocks += seen * min(_BLOCK, tokens - first)
    each = c.heads * (_BLOCK * (4 if c.dtype == "float32" else 6) + 4) + _BLOCK * c.heads // c.kv_heads
    return -(-blocks * each // tokens)
