"""Records and replays the experts of any mixture of transformers, without a line for any of them.

The idea: however a router scores, it ends with `torch.topk` of k among E experts, and computes its gates from what that
returns. So the call is intercepted while a block runs: the live selection is recorded, or the recorded experts and
their own scores are returned instead. The gates are then computed by the model's own code, so the gradient reaches the
router. A block whose router makes no such call cannot be replayed: `shape` finds that out before a run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Selection(TorchFunctionMode):
    """The experts of one block in one forward pass. Entered again (activations computed again) it repeats them."""

    def __init__(self, experts: int, k: int, replay: Tensor | None = None) -> None:
        """replay: int64 [N, k], with -1 where a token has no record."""
        super().__init__()
        self._experts, self._k, self._replay = experts, k, replay
        self.chosen: Tensor | None = None
        """int64 [N, k]"""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        if (scores.shape[-1], out.indices.shape[-1]) != (self._experts, self._k):
            return out
        live = out.indices.reshape(-1, self._k)
        wanted = self._replay if self.chosen is None else self.chosen
        # A live selection is gathered too: backward may compute it again, and then has to save the same tensors.
        self.chosen = live.detach() if wanted is None else torch.where(wanted >= 0, wanted, live)
        indices = self.chosen.view(out.indices.shape)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class Pass:
    """The state of one forward pass, which all blocks share."""

    recompute = False
    experts = k = 0
    replay: Tensor | None = None
    """int64 [N, L, k] over the blocks that route."""
    selections: dict[int, Selection]
    """By number of the block."""

    def __init__(self) -> None:
        self.selections = {}


class Block(nn.Module):
    """Mixed into the class of a model's block: it runs under its `Selection`, and keeps no activations on demand."""

    passing: Pass
    route: int
    """Its number among the blocks that route, -1 for the others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own class."""
        run: Callable[..., Any] = super().forward
        passing = self.passing
        if self.route >= 0 and passing.k:
            replay = None if passing.replay is None else passing.replay[:, self.route]
            selection = Selection(passing.experts, passing.k, replay)
            passing.selections[self.route] = selection
            plain = run

            def run(*inner: Any, **named: Any) -> Any:
                with selection:
                    return plain(*inner, **named)

        if passing.recompute and torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return run(*args, **kwargs)


def mixed(block: nn.Module, passing: Pass, route: int) -> None:
    """Make a block a `Block`, in place. Its class stays a subclass of its own."""
    kind = type(block)
    block.__class__ = type(kind.__name__, (Block, kind), {"__module__": kind.__module__})
    block.passing, block.route = passing, route  # type: ignore[assignment]
