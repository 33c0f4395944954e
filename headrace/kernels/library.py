"""Which of PyTorch's own CUDA kernels ordinary mode takes, and why not where it does not; imports no torch.

`torch.nn.attention.varlen.varlen_attn` is packed attention, `torch.nn.functional.grouped_mm` the products of experts.
`operators.library` calls them. Exact mode takes neither: the order of their sums depends on the batch. Each function
returns the reason for which ordinary mode keeps the kernel that it has otherwise; empty where the library's is taken.
The numerics' fingerprint names the kernels that are taken, and `headrace trainer plan` names attention's reason.

Trade-off: the gradient of `varlen_attn` adds by atomics, as that of torch's other fused attention
does, so ordinary mode on a GPU repeats a step with other bits; exact mode does not.
"""

VARLEN, GROUPED = "varlen_attn", "grouped_mm"
WIDEST = 192
"""Widest head that flash attention differentiates on every GPU since Ampere."""
AMPERE, HOPPER = 8, 9
"""Major compute capabilities."""
_ALIGNED = 8
"""bfloat16 numbers in 16 bytes, the unit of both kernels' rows."""


def attention_refusal(device: str, dtype: str, head_dim: int, value_dim: int) -> str:
    """Why ordinary mode keeps its own packed attention. head_dim: of queries and keys; value_dim: of values."""
    if device != "cuda":
        return f"{VARLEN} runs on CUDA devices alone"
    if dtype != "bfloat16":
        return f"{VARLEN} takes bfloat16, not {dtype}"
    if value_dim != head_dim:
        return f"{VARLEN} takes one head size, not keys of {head_dim} and values of {value_dim}"
    if head_dim > WIDEST or head_dim % _ALIGNED:
        return f"{VARLEN} takes heads up to {WIDEST} in multiples of {_ALIGNED}, not {head_dim}"
    return ""


def experts_refusal(device: str, dtype: str, exact: bool, widths: tuple[int, ...], capability: int, many: bool) -> str:
    """Why experts keep the Triton products. widths: the model's and the experts'; many: many rows per expert.

    capability: the GPU's major compute capability.
    """
    if exact:
        return f"{GROUPED} adds in an order of its own: not in exact mode"
    if device != "cuda" or capability != HOPPER:
        # Older GPUs loop over the groups with the host; on Blackwell the gradient of an expert without rows is not
        # zero (pytorch issue 172439).
        return f"{GROUPED} is taken on Hopper alone"
    if dtype != "bfloat16":
        return f"{GROUPED} takes bfloat16, not {dtype}"
    if any(width % _ALIGNED for width in widths):
        return f"{GROUPED} takes widths in multiples of {_ALIGNED}"
    if not many:
        return f"{GROUPED} is slower than the Triton products with few rows per expert"
    return ""
