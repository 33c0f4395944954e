"""The shape of a policy. Every field changes the numbers. `policy.layout.hugging_face` reads and writes config.json."""

from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.policy.rope import RopeScaling

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16"]


class CheckpointError(HeadraceError, exit_status=WRONG_INPUT):
    """A checkpoint that cannot be read, or asks for something this model does not compute."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys-values pass narrow ranks."""

    q_rank: int
    """Rank of the queries; 0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    """Width of the part of a query or key that is not rotated."""
    rope_dim: int
    """Width of the part that is rotated; all heads share the key's."""
    value_dim: int
    interleaved: bool = True
    """Whether rotary pairs are neighbouring elements instead of halves."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Low-rank adapters over fixed weights (LoRA, arXiv 2106.09685): see `policy.adapters`."""

    rank: int
    alpha: float
    """BA is multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Adapted projections of every layer, by Hugging Face's names: q_proj."""
    parameters: tuple[str, ...] = ()
    """Those of `targets` that experts have, of which all of a layer are one parameter (provider transformers)."""
    elements: int = 0
    """Of all matrices A and B (provider transformers)."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a decoder in elements: dense (experts 0) or a mixture, with grouped or `latent` attention.

    With `latent`, kv_heads is heads and head_dim is nope_dim + rope_dim: what the cache holds.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_dim: int
    """Inner width of an expert, or of the MLP of a dense model."""
    vocab: int
    dtype: Dtype = "float32"
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    normalise_top_k: bool = True
    tied: bool = False
    max_positions: int = 32_768
    # Later fields: `described` leaves them out at their defaults, so that older fingerprints stay valid.
    rope: RopeScaling | None = None
    latent: Latent | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """sigmoid: chosen with a learned correction added, weighted without it (arXiv 2408.15664)."""
    expert_groups: int = 1
    kept_groups: int = 1
    """Experts are chosen among those of the best `kept_groups` groups."""
    gate_scale: float = 1.0
    shared_experts: int = 0
    """Number of shared experts, which every token uses: one MLP of that many times expert_dim."""
    dense_layers: int = 0
    """Leading layers with a dense MLP instead of a mixture."""
    dense_dim: int = 0
    """Inner width of their MLP; 0 is expert_dim."""
    expert_format: Literal["", "mxfp8", "nvfp4"] = ""
    """How experts are served and multiplied; empty is `dtype`. See `kernels.mxfp8`, `kernels.block_scaled.nvfp4`."""
    model_type: Literal["", "glm4_moe", "llama", "mistral", "qwen2"] = ""
    """Hugging Face's name of the architecture; empty: qwen3, qwen3_moe or deepseek_v3, as the other fields say."""
    qk_norm: bool = True
    """Queries and keys are normalised head by head before they are rotated (grouped attention only)."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias (grouped attention only)."""
    out_bias: bool = False
    """Whether the output projection of attention has a bias (grouped attention only)."""
    rotary_dim: int = 0
    """Leading part of a query and key that is rotated (grouped attention only); 0 is head_dim."""
    adapter: Adapter | None = None
    """Low-rank adapters, the only weights that are trained; published beside the others under names of their own."""
    source: str = ""
    """The config.json of a policy of the provider `transformers`, which computes it; empty: `policy.model` does. The
    other fields then only describe it, and `experts` is 0 where routes cannot be replayed."""
    counted: tuple[int, int] | None = None
    """With `source`: elements of all parameters, and of those in experts."""
    live_routers: int = 0
    """With `source`: layers whose routers choose experts anew in training, because they cannot be replayed."""

    def __post_init__(self) -> None:
        if self.source:
            return  # the library has checked it
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"expected query heads in a multiple of {self.kv_heads} key-value heads, got {self.heads}"
            )
        if self.experts and not 0 < self.top_k <= self.experts:
            raise CheckpointError(f"expected top_k from 1 to the number of experts, {self.experts}, got {self.top_k}")
        turned = self.turned
        if turned > self.head_dim:
            raise CheckpointError(f"rotary_dim {turned} is larger than head_dim {self.head_dim}")
        if turned % 2:
            raise CheckpointError(f"expected an even head_dim for rotary pairs, got {turned}")
        if self.experts % self.expert_groups or not 0 < self.kept_groups <= self.expert_groups:
            raise CheckpointError(
                f"expected kept_groups <= expert_groups, which divide the experts, got "
                f"{self.kept_groups}, {self.expert_groups} and {self.experts}"
            )
        if self.experts and self.top_k > self.experts // self.expert_groups * self.kept_groups:
            raise CheckpointError(f"top_k {self.top_k} is more than the experts of {self.kept_groups} groups")
        if self.latent and (self.kv_heads, self.head_dim) != (
            self.heads,
            self.latent.nope_dim + self.latent.rope_dim,
        ):
            raise CheckpointError("latent attention has one key head per query head, of nope_dim + rope_dim")
        if self.latent and self.latent.value_dim > self.head_dim:
            raise CheckpointError(f"value_dim {self.latent.value_dim} is larger than a key of {self.head_dim}")
        block = {"mxfp8": 32, "nvfp4": 16}.get(self.expert_format, 1)
        if self.dim % block or self.expert_dim % block:
            raise CheckpointError(
                f"{self.expert_format} needs widths that are multiples of {block}, not {self.dim} and {self.expert_dim}"
            )

    @property
    def turned(self) -> int:
        """Width of the rotated part of a query or key."""
        return self.latent.rope_dim if self.latent else self.rotary_dim or self.head_dim

    @property
    def torch_dtype(self) -> "torch.dtype":
        """dtype of parameters and activations."""
        import torch  # here, so that a plan or a command reads a shape without torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    def sparse(self, layer: int) -> bool:
        """Whether a layer holds a mixture."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def sparse_layers(self) -> int:
        """The number of layers with a mixture."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def described(self) -> str:
        """The config as text. Later fields are left out at their defaults, so that older fingerprints stay valid."""
        fields = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in _LATER or value != _LATER[name]:
                fields.append(f"{name}={value!r}")
        return f"PolicyConfig({', '.join(fields)})"

    @property
    def routed_dtype(self) -> str:
        """numpy dtype of routed experts: |u1 up to 255 experts, <u2 beyond; the largest value means none."""
        return "|u1" if self.experts <= 255 else "<u2"


_FIELDS = msgspec.structs.fields(PolicyConfig)
_LATER = {field.name: field.default for field in _FIELDS[[field.name for field in _FIELDS].index("rope") :]}
