"""A decoder layer with grouped or latent attention and with a dense MLP or a mixture of experts.

Parameters are fused where that saves products (q, k and v; gate and up; experts as one 3D tensor). A layer is a module
that is called, so that hooks on calls work: FSDP gathers the shards, activation checkpointing computes it again.
"""

from functools import partial

import torch
from torch import Tensor, nn

from headrace.kernels import operators
from headrace.kernels.route import Rule
from headrace.policy import latent, moe
from headrace.policy.adapters import low_rank
from headrace.policy.attention import Attend
from headrace.policy.config import PolicyConfig


class Chosen:
    """A layer's selection in one forward. It is not a list, because hooks on calls copy lists."""

    experts: Tensor | None = None
    """int64 [N, k]"""
    counts: moe.RowCounts | None = None
    """The rows that processes with owned experts exchange for it."""


def expert_function(config: PolicyConfig) -> moe.ExpertFunction:
    """The experts' arithmetic in the policy's number format."""
    return partial(operators.experts, grid=config.expert_format) if config.expert_format else operators.experts


class Layer(nn.Module):
    """Attention (grouped or latent), then the mixture or a dense MLP."""

    def __init__(self, config: PolicyConfig, index: int = 0) -> None:
        super().__init__()
        c, dtype = config, config.torch_dtype
        self.config, self.sparse = config, config.sparse(index)
        self.rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
        self.function = expert_function(config)
        """Replaced where the stored experts are masters."""
        self.owned: moe.OwnedExperts | None = None
        """Set in place of `function` where each process owns some of the experts, and holds no others."""

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attention_norm, self.mlp_norm = new(c.dim), new(c.dim)
        if c.latent:
            for name, parameter in latent.parameters(c.latent, c.heads, c.dim, dtype).items():
                self.register_parameter(name, parameter)
            self.out = new(c.dim, c.heads * c.latent.value_dim)
        else:
            if c.qk_norm:
                self.q_norm, self.k_norm = new(c.head_dim), new(c.head_dim)
            self.qkv = new((c.heads + 2 * c.kv_heads) * c.head_dim, c.dim)
            if c.qkv_bias:
                self.qkv_bias = new((c.heads + 2 * c.kv_heads) * c.head_dim)
            if c.out_bias:
                self.out_bias = new(c.dim)
            self.out = new(c.dim, c.heads * c.head_dim)
        if self.sparse:
            self.router = new(c.experts, c.dim)
            self.gate_up = new(c.experts, 2 * c.expert_dim, c.dim)
            self.down = new(c.experts, c.dim, c.expert_dim)
        else:
            width = c.dense_dim or c.expert_dim
            self.gate_up = new(2 * width, c.dim)
            self.down = new(c.dim, width)
        if self.sparse and c.shared_experts:
            width = c.shared_experts * c.expert_dim
            self.shared_gate_up, self.shared_down = new(2 * width, c.dim), new(c.dim, width)
        if self.sparse and c.scores == "sigmoid":
            # A rule balances the load (arXiv 2408.15664); the loss has no gradient here.
            self.correction = nn.Parameter(torch.zeros(c.experts), requires_grad=False)
        self.adapted = low_rank.add_parameters(self, c, index)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        exact: bool,
        replay: Tensor | None,
        chosen: Chosen,
    ) -> Tensor:
        """x [N, D] -> [N, D]. cos, sin [N, 1, D / 2]; replay int64 [N, k], see `moe.mixture`.

        chosen: one per layer and forward. The first call leaves its selection there; a second one (activations computed
        again) finds it and takes the very same experts, also where no record was to be replayed. Where experts have
        owners, a call that finds no counts exchanges them and leaves them there.
        """
        first = chosen.experts is None
        recorded = replay if first else chosen.experts
        mixed = attend(*self._project(x, cos, sin, exact))
        x, h = self._behind_attention(x, mixed, exact)
        if not self.sparse:
            inner = operators.swiglu(low_rank.linear(self, h, "gate_up", exact))
            return x + low_rank.linear(self, inner, "down", exact)
        mixture = self._mixture(first)
        if self.owned is None:
            out, chosen.experts = moe.mixture(h, mixture, exact, recorded)
        else:
            out, chosen.experts = self._over_owners(self.owned, h, mixture, exact, recorded, chosen)
        return self._added(x, h, out, exact)

    def _over_owners(
        self,
        owned: moe.OwnedExperts,
        h: Tensor,
        mixture: moe.Mixture,
        exact: bool,
        replay: Tensor | None,
        chosen: Chosen,
    ) -> tuple[Tensor, Tensor]:
        """As `moe.mixture`, with experts that several processes own."""
        gates, experts = moe.routed(h, mixture, exact, replay)
        if chosen.counts is None:
            told = owned.counts(experts[:, None])
            assert told is not None, "every token has its experts here"
            chosen.counts = told[0]
        return owned(h, gates, experts, self.gate_up, self.down, exact, chosen.counts), experts

    def _behind_attention(self, x: Tensor, mixed: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        """The rows with what their heads read added, and these normalised: the input of the MLP or the mixture."""
        c = self.config
        if c.latent:
            mixed = mixed[..., : c.latent.value_dim]
        mixed = low_rank.linear(self, mixed.reshape(len(x), -1), "out", exact)
        x = x + (mixed + self.out_bias if c.out_bias else mixed)
        return x, operators.rms_norm(x, self.mlp_norm, c.eps)

    def _mixture(self, first: bool) -> moe.Mixture:
        c = self.config
        return moe.Mixture(
            router=self.router,
            gate_up=self.gate_up,
            down=self.down,
            k=c.top_k,
            normalise=c.normalise_top_k,
            rule=self.rule if first else self.rule._replace(plausible=0.0),
            correction=getattr(self, "correction", None),
            function=self.function,
        )

    def _added(self, x: Tensor, h: Tensor, out: Tensor, exact: bool) -> Tensor:
        """The rows of the next layer, from what the experts made of h."""
        if self.config.shared_experts:
            out = out + _mlp(h, self.shared_gate_up, self.shared_down, exact)
        return x + out

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some rows."""
        c = self.config
        h = operators.rms_norm(x, self.attention_norm, c.eps)
        if c.latent:
            return latent.project(self, h, c.latent, c.heads, cos, sin, exact)
        h = low_rank.linear(self, h, "qkv", exact)
        if c.qkv_bias:
            h = h + self.qkv_bias
        h = h.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = torch.split(h, [c.heads + c.kv_heads, c.kv_heads], 1)
        if c.qk_norm:
            scales = torch.cat((self.q_norm.expand(c.heads, -1), self.k_norm.expand(c.kv_heads, -1)))
            qk = operators.rms_norm(qk, scales, c.eps)
        qk = operators.rotate(qk, cos, sin)
        q, k = torch.split(qk, [c.heads, c.kv_heads], 1)
        return q.contiguous(), k.contiguous(), v.contiguous()


def _mlp(h: Tensor, gate_up: Tensor, down: Tensor, exact: bool) -> Tensor:
    return operators.linear(operators.swiglu(operators.linear(h, gate_up, exact)), down, exact)
