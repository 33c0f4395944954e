"""The only definition of the policy: a decoder that sampler and trainer share.

The architectures are small variations of it, named in `layout.hugging_face`.

Idea: most of the mismatch between sampling and training comes from two programs computing one model. Here both are
this class; `forward` sees whole packed sequences, `forward_cached` the new tokens of some sequences over a KV cache,
and in exact mode a position's hidden state has the same bits either way.

Layout: `layer.Layer` holds a layer's fused parameters. At the border, `state` and `load_state` speak Hugging Face
names, one tensor per projection and expert (`names`).
Dimensions: N tokens (sequences concatenated), D model width, L layers, k experts per token.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.kernels import operators
from headrace.kernels.block_attention import Packing
from headrace.policy import attention, moe
from headrace.policy.adapters import low_rank
from headrace.policy.attention import Attend
from headrace.policy.cache import KVCache, Step
from headrace.policy.config import PolicyConfig
from headrace.policy.layer import Chosen, Layer
from headrace.policy.layout import initial, names
from headrace.policy.layout.checkpoint import load as read
from headrace.policy.numerics import Numerics
from headrace.policy.seam import PolicyModel

__all__ = ["Layer", "Model"]


class Model(PolicyModel):
    """Packed and cached forward of one policy. Parameters have the config's dtype."""

    def __init__(self, config: PolicyConfig, numerics: Numerics, *, seed: int | None = 0, device: str = "cpu") -> None:
        """seed None leaves the parameters unset, for `load_state`. device: of the parameters; meta takes no memory."""
        super().__init__(config, numerics)
        with torch.device(device):
            self.embedding = nn.Parameter(torch.empty(config.vocab, config.dim, dtype=config.torch_dtype))
            self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
            self.norm = nn.Parameter(torch.empty(config.dim, dtype=config.torch_dtype))
            if not config.tied:
                self.head = nn.Parameter(torch.empty(config.vocab, config.dim, dtype=config.torch_dtype))
        self._rotary = attention.Rotary(config.turned, config.rope_theta, config.torch_dtype, config.rope)
        self._scale = config.head_dim**-0.5 * (config.rope.heat if config.latent and config.rope else 1.0)
        if seed is not None:
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New random weights, the same for the same seed (`layout.initial`)."""
        low_rank.reset(self, seed)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        for name, value in initial.values(self.config, shapes, seed):
            self.get_parameter(name).copy_(value)
        if self.config.expert_format:
            self.load_state(self.state())  # onto the grid

    @property
    def blocks(self) -> list[nn.Module]:
        """As the seam."""
        return list(self.layers)

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
        """As the seam."""
        packing = self._packing(ids, lengths)
        attend = self._over(packing)
        return self._decode(ids, packing.positions, max(lengths, default=0), lambda _: attend, routed, recorder)

    def sampled_logprobs(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        routed: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        places: Callable[[Sequence[int]], Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """As the seam."""
        packing, shared = self._packing(ids, lengths), self.shared
        attend, longest = self._over(packing), max(lengths, default=0)
        if shared is None:
            hidden = self._decode(ids, packing.positions, longest, lambda _: attend, routed, None)
            return self.selected_logprobs(hidden[rows], targets, temperature)
        cuts = [packing.tokens * process // shared.size for process in range(shared.size + 1)]
        start, end = cuts[shared.rank : shared.rank + 2]
        tokens = [last - first for first, last in itertools.pairwise(cuts)]
        hidden = self._decode(
            ids[start:end],
            packing.positions[start:end],
            longest,
            lambda _: shared.around(attend, tokens),
            None if routed is None else routed[start:end],
            None,
        )
        before = places(cuts)
        mine = slice(*before[shared.rank : shared.rank + 2])
        logp, entropy = self.selected_logprobs(hidden[rows[mine] - start], targets[mine], temperature)
        sampled = [last - first for first, last in itertools.pairwise(before)]
        return shared.joined(logp, sampled), shared.joined(entropy, sampled)

    def _packing(self, ids: Tensor, lengths: Sequence[int]) -> Packing:
        packing = Packing(lengths, ids.device)
        if packing.tokens != len(ids):
            raise ValueError(f"expected lengths that add up to {len(ids)} ids, got {packing.tokens}")
        return packing

    def _over(self, packing: Packing) -> Attend:
        """Attention within packed sequences."""
        exact = self.numerics.exact

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.packed(q, k, v, packing, self._scale, exact)

        return run

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
        """As the seam."""
        with torch.no_grad():
            step = Step(lengths, starts, tables, cache)
            exact = self.numerics.exact

            def attend(layer: int) -> Attend:
                def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    return attention.cached(q, k, v, step, cache, layer, self._scale, exact)

                return run

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
        """Hidden states of tokens."""
        c, exact = self.config, self.numerics.exact
        cos, sin = self._rotary(positions, longest)
        replay = None if routed is None else moe.widen(routed, c.sparse_layers, c.top_k)
        counts = self._counted(replay)
        again = self.recompute and torch.is_grad_enabled()
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if layer.rule.plausible != self.plausible:
                layer.rule = layer.rule._replace(plausible=self.plausible)
            recorded = None if replay is None or not layer.sparse else replay[:, index - c.dense_layers]
            chosen = Chosen()
            if counts is not None and layer.sparse:
                chosen.counts = counts[index - c.dense_layers]
            arguments = (x, cos, sin, attend(index), exact, recorded, chosen)
            if again:
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
            if recorder is not None and chosen.experts is not None:
                recorder.append(chosen.experts)
        return operators.rms_norm(x, self.norm, c.eps)

    def _counted(self, replay: Tensor | None) -> Sequence[moe.RowCounts] | None:
        """The rows that processes with owned experts exchange in each layer that routes, from one exchange for all of
        them. None where experts have no owners, and where a token has no record: each layer then exchanges its own."""
        last = self.layers[-1]
        assert isinstance(last, Layer)
        if last.owned is None or replay is None or self.plausible > 0.0:
            return None
        return last.owned.counts(replay)

    def logits(self, hidden: Tensor) -> Tensor:
        """As the seam."""
        return operators.linear(hidden, self.head_weight, self.numerics.exact)

    def selected_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """As the seam."""
        return operators.selected_logprob(hidden, self.head_weight, targets, temperature, self.numerics.exact)

    def load(self, folder: str | Path) -> None:
        """As the seam. An adapter keeps its own weights."""
        adapters = {name: value for name, value in self.state().items() if low_rank.is_published(name)}
        self.load_state(adapters | read(folder)[1])

    def views(self) -> dict[str, Tensor]:
        """As the seam."""
        return names.views(self.config, {name: parameter.data for name, parameter in self.named_parameters()})
