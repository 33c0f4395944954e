"""The policy's one definition: a Qwen3-MoE decoder that sampler and trainer share.

Idea: most of the mismatch between sampling and training comes from two programs computing one model. Here both are
this class; `forward` sees whole packed sequences, `forward_cached` the new tokens of some sequences over a KV cache,
and in exact mode a position's hidden state has the same bits either way.

Layout: parameters are fused where that saves products (q, k and v; gate and up; experts as one 3D tensor). At the
border, `state` and `load_state` speak Hugging Face names, one tensor per projection and expert.
Suffixes: N tokens (sequences concatenated), D model width, L layers, k experts a token.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels import batch_invariant
from headrace.kernels.block_attention import Packing
from headrace.kernels.selected_logprob import selected_logprob
from headrace.policy import attention, moe
from headrace.policy.cache import KVCache, Step
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.numerics import Numerics

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One decoder layer: attention with q/k norm, then the mixture (or a dense MLP)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        c, dtype = config, config.torch_dtype

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attention_norm, self.mlp_norm = new(c.dim), new(c.dim)
        self.q_norm, self.k_norm = new(c.head_dim), new(c.head_dim)
        self.qkv = new((c.heads + 2 * c.kv_heads) * c.head_dim, c.dim)
        self.out = new(c.dim, c.heads * c.head_dim)
        if c.experts:
            self.router = new(c.experts, c.dim)
            self.gate_up = new(c.experts, 2 * c.expert_dim, c.dim)
            self.down = new(c.experts, c.dim, c.expert_dim)
        else:
            self.gate_up = new(2 * c.expert_dim, c.dim)
            self.down = new(c.dim, c.expert_dim)


class Model(nn.Module):
    """Packed and cached forward of one policy. Parameters have the config's dtype."""

    def __init__(self, config: PolicyConfig, numerics: Numerics, *, seed: int | None = 0) -> None:
        """seed None leaves the parameters unset, for `load_state`."""
        super().__init__()
        self.config, self.numerics = config, numerics
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.dim, dtype=config.torch_dtype))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.dim, dtype=config.torch_dtype))
        if not config.tied:
            self.head = nn.Parameter(torch.empty(config.vocab, config.dim, dtype=config.torch_dtype))
        self._rotary = attention.Rotary(config.head_dim, config.rope_theta, config.torch_dtype)
        self._scale = config.head_dim**-0.5
        if seed is not None:
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New random weights, the same for the same seed. Residual outputs start small, the head nearly flat."""
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if kind == "norm" or kind.endswith("_norm"):
                parameter.fill_(1.0)
                continue
            std = parameter.shape[-1] ** -0.5
            if kind in ("out", "down"):
                std *= shrink
            elif kind in ("embedding", "head"):
                std = 0.02 if kind == "head" or self.config.tied else 0.5
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(draw.mul_(std))

    @property
    def head_weight(self) -> Tensor:
        """[V, D], the embedding itself when tied."""
        return self.embedding if self.config.tied else self.head

    def forward(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        routed: Tensor | None = None,
        recorder: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [N, D] after the final norm, of sequences concatenated in ids int64 [N].

        lengths: tokens of each sequence, sum N. routed [N, L, k], see `moe.widen`: selections to replay.
        recorder: gets one int64 [N, k] per layer, the selections used. ValueError when lengths do not add up.
        """
        packing = Packing(lengths, ids.device)
        if packing.tokens != len(ids):
            raise ValueError(f"lengths add up to {packing.tokens}, there are {len(ids)} ids")
        exact = self.numerics.exact

        def attend(layer: int) -> Attend:
            return lambda q, k, v: attention.packed(q, k, v, packing, self._scale, exact)

        return self._decode(ids, packing.positions, max(lengths, default=0), attend, routed, recorder)

    def forward_cached(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        cache: KVCache,
        routed: Tensor | None = None,
        recorder: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [N, D] of new tokens: sequence b brings lengths[b] > 0 of them at position starts[b], over what
        the blocks tables[b] of the cache hold; their keys and values are written there. No gradient.
        """
        with torch.no_grad():
            step = Step(lengths, starts, tables, cache)
            exact, pad = self.numerics.exact, self.numerics.row_pad

            def attend(layer: int) -> Attend:
                return lambda q, k, v: attention.cached(q, k, v, step, cache, layer, self._scale, pad, exact)

            longest = max(start + length for start, length in zip(starts, lengths, strict=True))
            return self._decode(ids, step.positions, longest, attend, routed, recorder)

    def _decode(
        self,
        ids: Tensor,
        positions: Tensor,
        longest: int,
        attend: Callable[[int], Attend],
        routed: Tensor | None,
        recorder: list[Tensor] | None,
    ) -> Tensor:
        c, pad = self.config, self.numerics.row_pad
        cos, sin = self._rotary(positions, longest)
        replay = None if routed is None else moe.widen(routed, c.layers, c.top_k)
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            h = batch_invariant.rms_norm(x, layer.attention_norm, c.eps)
            h = batch_invariant.linear(h, layer.qkv, pad).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            qk, v = torch.split(h, [c.heads + c.kv_heads, c.kv_heads], 1)
            scales = torch.cat((layer.q_norm.expand(c.heads, -1), layer.k_norm.expand(c.kv_heads, -1)))
            qk = batch_invariant.rotate(batch_invariant.rms_norm(qk, scales, c.eps), cos, sin)
            q, k = torch.split(qk, [c.heads, c.kv_heads], 1)
            mixed = attend(index)(q.contiguous(), k.contiguous(), v.contiguous())
            x = x + batch_invariant.linear(mixed.reshape(-1, c.heads * c.head_dim), layer.out, pad)
            h = batch_invariant.rms_norm(x, layer.mlp_norm, c.eps)
            x = x + self._mlp(h, layer, None if replay is None else replay[:, index], recorder)
        return batch_invariant.rms_norm(x, self.norm, c.eps)

    def _mlp(self, h: Tensor, layer: Layer, replay: Tensor | None, recorder: list[Tensor] | None) -> Tensor:
        c, pad = self.config, self.numerics.row_pad
        if not c.experts:
            inner = batch_invariant.swiglu(batch_invariant.linear(h, layer.gate_up, pad))
            return batch_invariant.linear(inner, layer.down, pad)
        out, experts = moe.mixture(h, layer.router, layer.gate_up, layer.down, c.top_k, c.normalise_top_k, pad, replay)
        if recorder is not None:
            recorder.append(experts)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, D] -> [M, V] in the model's dtype, as `selected_logprobs` computes them."""
        return batch_invariant.linear(hidden, self.head_weight, self.numerics.row_pad)

    def selected_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden [M, D], targets int64 [M] -> (log-probability of each target, entropy in nats), float32 [M].

        The log-probability carries gradients, the entropy none. Temperature 0 scores as 1.
        """
        return selected_logprob(hidden, self.head_weight, targets, temperature, self.numerics.row_pad)

    def state(self) -> dict[str, Tensor]:
        """A copy of all weights under Hugging Face names, each contiguous and with memory of its own."""
        return {name: view.detach().clone() for name, view in self._views().items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights under Hugging Face names, cast to the config's dtype. CheckpointError when one is missing, left
        over or of another shape."""
        views = self._views()
        extra = set(tensors) - set(views) - ({"lm_head.weight"} if self.config.tied else set())
        missing = set(views) - set(tensors)
        if extra or missing:
            first = sorted(extra or missing)[0]
            raise CheckpointError(f"{len(extra)} tensors too many, {len(missing)} missing; the first is {first}")
        for name, view in views.items():
            if view.shape != tensors[name].shape:
                raise CheckpointError(f"{name} is {list(tensors[name].shape)}, the model has {list(view.shape)}")
            view.copy_(tensors[name])

    def _views(self) -> dict[str, Tensor]:
        """Hugging Face name -> the part of a parameter that it names."""
        c = self.config
        out: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding.data, "model.norm.weight": self.norm.data}
        if not c.tied:
            out["lm_head.weight"] = self.head.data
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            at = f"model.layers.{index}."
            out[at + "input_layernorm.weight"] = layer.attention_norm.data
            out[at + "post_attention_layernorm.weight"] = layer.mlp_norm.data
            widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
            for name, part in zip("qkv", torch.split(layer.qkv.data, widths), strict=True):
                out[f"{at}self_attn.{name}_proj.weight"] = part
            out[at + "self_attn.q_norm.weight"] = layer.q_norm.data
            out[at + "self_attn.k_norm.weight"] = layer.k_norm.data
            out[at + "self_attn.o_proj.weight"] = layer.out.data
            experts = range(c.experts) if c.experts else (None,)
            if c.experts:
                out[at + "mlp.gate.weight"] = layer.router.data
            for expert in experts:
                name = at + ("mlp." if expert is None else f"mlp.experts.{expert}.")
                gate_up = layer.gate_up.data if expert is None else layer.gate_up.data[expert]
                out[name + "gate_proj.weight"], out[name + "up_proj.weight"] = torch.split(gate_up, c.expert_dim)
                out[name + "down_proj.weight"] = layer.down.data if expert is None else layer.down.data[expert]
        return out
