"""The seam of a policy: trainer, engines, checkpoints and published weights use these methods alone.

Both providers (`policy.provider`) implement it.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.policy.attention import TokenSharing
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import formats, names
from headrace.policy.numerics import Numerics


class Cache(Protocol):
    """The memory of forwarded positions, in blocks of 64 whose owner the caller knows."""

    blocks: int
    """How many there are."""
    shared: bool
    """Whether sequences may use each other's whole blocks, and be cut."""

    @property
    def block_bytes(self) -> int:
        """Memory of a block."""

    def forget(self, block: int) -> None:
        """No sequence uses this block any longer."""


class PolicyModel(nn.Module):
    """Packed and cached forward of one policy. Parameters that are trained have the config's dtype."""

    def __init__(self, config: PolicyConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        self.recompute = False
        """Whether backward computes the activations inside layers again, with the routes of the forward pass."""
        self.served_dtype: torch.dtype | None = None
        """Set by a trainer whose weights are published in fewer bits than they are computed in: see
        `training.served.precision`."""
        self.plausible = 0.0
        """Share of the weakest live score below which a replayed expert is replaced: `kernels.route.Rule.plausible`."""
        self.shared: TokenSharing | None = None
        """Set where other processes compute a part of the tokens in `sampled_logprobs`."""
        self.place: torch.device | None = None
        """Set where the weights wait in the host's memory until another device computes with them."""
        self.most: Callable[[int], int] | None = None
        """Set where processes hold shards: the largest of a number that each of them has."""

    @property
    def device(self) -> torch.device:
        """The device that computes; inputs and caches must be there."""
        return self.place or next(self.parameters()).device

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The modules that a sharded model gathers one after the other."""

    @abstractmethod
    def forward(
        self, ids: Tensor, lengths: Sequence[int], routed: Tensor | None = None, recorder: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states [N, D] after the final norm, of sequences concatenated in ids int64 [N].

        lengths: tokens of each sequence, sum N. routed [N, L, k], see `moe.widen`: selections to replay, over the L
        layers that route. recorder: gets one int64 [N, k] for each of those, the selections used.
        ValueError when lengths do not add up.
        """

    @abstractmethod
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
        """Log-probabilities and entropies, as `selected_logprobs`, of the tokens `targets` int64 [M] behind the
        positions `rows` int64 [M] of ids, ascending.

        Where `shared` is set, each of its processes takes a run of the tokens, at least one, and the result is of all
        tokens. The gradient of this process is then that of its run; the sum over processes is the whole gradient.
        places: the number of `rows` below each of some borders; the host knows it without a wait for the device.
        """

    @abstractmethod
    def forward_cached(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        cache: Any,
        routed: Tensor | None = None,
        recorder: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [N, D] of new tokens: sequence b brings lengths[b] > 0 of them at position starts[b], over what
        the blocks tables[b] of the cache (`new_cache`) hold, and adds to it. No gradient.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, D] -> [M, V] in the model's dtype, as `selected_logprobs` computes them."""

    @abstractmethod
    def selected_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden [M, D], targets int64 [M] -> (log-probability of each target, entropy in nats), float32 [M].

        The log-probability carries gradients, the entropy none. Temperature 0 scores as 1.
        """

    @abstractmethod
    def load(self, folder: str | Path) -> None:
        """Take the weights of a checkpoint folder. CheckpointError when it cannot be read or is of another policy."""

    @abstractmethod
    def views(self) -> dict[str, Tensor]:
        """The part of a parameter for each published name, in the parameter's memory."""

    def state(self) -> dict[str, Tensor]:
        """A copy of all weights under their published names, as they are published (see `formats`)."""
        whole = {name: view.detach().clone() for name, view in self.views().items()}
        return formats.pack(self.config, whole)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights under published names, cast to the config's dtype. CheckpointError when one is missing, left
        over or of another shape."""
        views, tensors = self.views(), formats.unpack(self.config, tensors)
        extra = set(tensors) - set(views) - ({"lm_head.weight"} if self.config.tied else set())
        missing = set(views) - set(tensors)
        names.check_names(missing, extra)
        for name, view in views.items():
            if view.shape != tensors[name].shape:
                raise CheckpointError(f"{name}: expected shape {list(view.shape)}, got {list(tensors[name].shape)}")
            view.copy_(tensors[name])
