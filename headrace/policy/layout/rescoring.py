"""Bytes of scoring a recorded sequence again (`policy.scoring`), in closed form, without torch.

The sequence's keys and values are in a cache, and one piece of it after the other is forwarded. Every process that
shares the weights forwards all of it: context parallelism does not divide these bytes.
"""

from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import element_bytes

PIECE = 4096
"""Positions of one forward pass, `policy.scoring.PIECE`."""
_BLOCK = 64
"""Positions of a block of the cache."""
_CHUNK = 1024
"""Rows of logits at once, `kernels.selected_logprob.CHUNK`."""


def cache_bytes(config: PolicyConfig, tokens: int) -> int:
    """Bytes of the keys and values of a sequence."""
    blocks = -(-tokens // _BLOCK)
    return 2 * config.layers * blocks * _BLOCK * config.kv_heads * config.head_dim * element_bytes(config)


def forward_bytes(config: PolicyConfig, sparse: bool) -> int:
    """Bytes per position of the temporary tensors that one layer's forward pass without gradient holds at once.

    Of a mixture: the rows of its experts' outputs, their copy by slot and, in float32, its product with the gates; or
    the inner width and the rows that it is made of. Of attention over the cache: queries, the output and the scores of
    one block in float32. The hidden state before the layer and the norm's are alive in all of them.
    """
    c, size = config, element_bytes(config)
    wide = 4 if size == 4 else 8  # bytes of a float32 copy and a product of it; the copy is the tensor in float32
    k = c.top_k if sparse else 1
    inner = c.expert_dim if sparse else c.dense_dim or c.expert_dim
    mlp = size * k * 3 * inner
    if sparse:
        mlp = max(k * c.dim * (2 * size + wide), k * (size * (c.dim + 3 * inner))) + size * k * 2 * inner
    attending = c.heads * (c.head_dim * (2 * size + 8) + _BLOCK * wide) + 2 * size * c.kv_heads * c.head_dim
    return max(mlp, attending) + 3 * size * c.dim


def scoring_bytes(config: PolicyConfig, tokens: int, *, cpu: bool, gathered: int = 0) -> int:
    """Bytes of scoring a sequence of `tokens` inputs: the cache, a layer of one piece or its logits, and routes.

    cpu: logits are in memory, as on a GPU they never are; and the recorded routes of the sequence, in int64. gathered:
    bytes of layers that a forward pass gathers, and not the head.
    """
    rows, size = min(tokens, PIECE), element_bytes(config)
    layer = rows * max((forward_bytes(config, config.sparse(index)) for index in range(config.layers)), default=0)
    head = min(rows, _CHUNK) * config.vocab * (size + 3 * 4) if cpu else 0
    routes = 8 * config.sparse_layers * config.top_k
    return cache_bytes(config, tokens) + max(layer + gathered, head) + routes * (2 * rows + (2 * tokens if cpu else 0))
