"""A causal language model of transformers as a policy: the same packed and cached forward that the trainer and the
embedded engine know of `policy.model`, for any of the library's types.

Sequences of a micro-batch are rows of about equal length, padded behind their end. A causal model never looks there, so
rows need no mask and cannot leak, whatever their blocks are: attention, windows, chunks or a recurrent state. Packing
into one row would need boundaries that recurrent blocks do not take, and a mask of the square of all tokens.

The head is the model's own: its forward runs over given hidden states, chunk by chunk, so scaled and capped logits are
right and no tensor of [tokens, vocabulary] exists. Backward computes a chunk's logits again.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.kernels.selected_logprob import from_logits, scaled
from headrace.policy import moe
from headrace.policy.adapters import low_rank
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.hugging import adapter, library, published, routing
from headrace.policy.hugging.cache import Held, Sequences
from headrace.policy.layout.pieces import Pieces
from headrace.policy.numerics import Numerics
from headrace.policy.seam import PolicyModel

LOGITS = 1 << 26
"""Logits that are held at once."""
PADDING = 1 / 8
"""Largest share of padding in a batch of rows."""


class HuggingModel(PolicyModel):
    """Packed and cached forward of a model of transformers, in ordinary mode."""

    def __init__(
        self, config: PolicyConfig, numerics: Numerics, *, seed: int | None = None, device: str = "cpu"
    ) -> None:
        """The parameters are unset; a seed sets the adapters alone. device: of the parameters; meta takes no memory.
        CheckpointError."""
        super().__init__(config, numerics)
        model = adapter.skeleton(config)
        self.inner: Any = library.materialised(model, device)
        prefix = model.base_model_prefix
        self._body_name: str = prefix if hasattr(model, prefix) else "model"
        self.passing = routing.Pass()
        self.passing.experts, self.passing.k = config.experts, config.top_k
        kinds, route = library.router_kinds(model), 0
        for block in library.blocks(model):
            routes = bool(config.experts) and library.parent(block, kinds) is not None
            routing.mixed(block, self.passing, route if routes else -1)
            route += routes
        if config.adapter and seed is not None:
            low_rank.reset(self, seed)

    @property
    def blocks(self) -> list[nn.Module]:
        """As the seam."""
        return [module for module in self.inner.modules() if isinstance(module, routing.Block)]

    def forward(
        self, ids: Tensor, lengths: Sequence[int], routed: Tensor | None = None, recorder: list[Tensor] | None = None
    ) -> Tensor:
        """As the seam."""
        if sum(lengths) != len(ids):
            raise ValueError(f"expected lengths that add up to {len(ids)} ids, got {sum(lengths)}")
        replay = None if routed is None or not self.config.experts else self._widened(routed)
        pieces = list(torch.split(ids, list(lengths)))
        records = [None] * len(pieces) if replay is None else list(torch.split(replay, list(lengths)))
        hidden: list[Tensor] = [ids.new_empty(0)] * len(pieces)
        routes: list[list[Tensor]] = [[] for _ in pieces]
        batches = rows(lengths)
        # Each process gathers layers as often as the one with the most batches.
        idle = self.most(len(batches)) - len(batches) if self.most is not None else 0
        for batch in batches:
            longest = max(lengths[at] for at in batch)
            grid = ids.new_zeros(len(batch), longest)
            again = None if replay is None else replay.new_full((len(batch), longest, *replay.shape[1:]), -1)
            for row, at in enumerate(batch):
                grid[row, : lengths[at]] = pieces[at]
                if again is not None and (record := records[at]) is not None:
                    again[row, : lengths[at]] = record
            out = self._body(grid, None if again is None else again.flatten(0, 1))
            for row, at in enumerate(batch):
                hidden[at] = out[row, : lengths[at]]
                if recorder is not None:
                    routes[at] = [each.view(*grid.shape, -1)[row, : lengths[at]] for each in self._chosen()]
        whole = torch.cat([piece for piece, length in zip(hidden, lengths, strict=True) if length])
        for _ in range(idle):
            whole = whole + 0.0 * self._body(ids.new_zeros(1, 1), None).sum()
        if recorder is not None:
            recorder.extend(torch.cat(layer) for layer in zip(*(each for each in routes if each), strict=True))
        return whole

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
        return self.selected_logprobs(self(ids, lengths, routed)[rows], targets, temperature)

    @torch.no_grad()
    def forward_cached(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        cache: Sequences,
        routed: Tensor | None = None,
        recorder: list[Tensor] | None = None,
    ) -> Tensor:
        """As the seam."""
        hidden: list[Tensor] = []
        routes: list[list[Tensor]] = []
        replay = None if routed is None or not self.config.experts else self._widened(routed)
        at = 0
        for length, start, table in zip(lengths, starts, tables, strict=True):
            new = ids[at : at + length]
            record = None if replay is None else replay[at : at + length]
            held, before = self._held(cache, table[0], start)
            if before:  # its own routes are live
                new = torch.cat((torch.tensor(before, device=ids.device), new))
                record = (
                    None if record is None else torch.cat((record.new_full((start, *record.shape[1:]), -1), record))
                )
            hidden.append(self._body(new[None], record, held.past)[0, -length:])
            routes.append([each[-length:] for each in self._chosen()] if recorder is not None else [])
            held.ids.extend(new.tolist())
            at += length
        if recorder is not None:
            recorder.extend(torch.cat(layer) for layer in zip(*routes, strict=True))
        return torch.cat(hidden)

    def _held(self, cache: Sequences, block: int, start: int) -> tuple[Held, list[int]]:
        """The cache of a sequence, and the tokens before `start` that have to be forwarded again first: where the cache
        goes on behind them, because not every layer can forget."""
        held = cache.held.get(block)
        if start and (held is None or len(held.ids) < start):
            raise ValueError(f"the cache holds no {start} positions of the sequence of block {block}")
        if start and held is not None and len(held.ids) == start:
            return held, []
        new = Held([], library.transformers().DynamicCache(config=self.inner.config))
        cache.held[block] = new
        return new, held.ids[:start] if start and held is not None else []

    def _body(self, grid: Tensor, replay: Tensor | None, past: Any = None) -> Tensor:
        """Hidden states [B, T, D] of rows."""
        self.passing.recompute = self.recompute
        self.passing.replay, self.passing.selections = replay, {}
        out = self.inner.get_submodule(self._body_name)(
            input_ids=grid, past_key_values=past, use_cache=past is not None
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _chosen(self) -> list[Tensor]:
        """The experts that each block which routes took in the last forward pass."""
        chosen = (selection.chosen for _, selection in sorted(self.passing.selections.items()))
        return [each for each in chosen if each is not None]

    def _widened(self, routed: Tensor) -> Tensor:
        return moe.widen(routed, self.config.sparse_layers, self.config.top_k)

    def views(self) -> dict[str, Tensor]:
        """As the seam."""
        return published.views(self.config, {name: parameter.data for name, parameter in self.named_parameters()})

    def logits(self, hidden: Tensor) -> Tensor:
        """As the seam."""
        inner = copy.copy(self.inner)
        inner._modules = {**self.inner._modules, self._body_name: _Given(hidden[None])}
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = inner(input_ids=ids, use_cache=False).logits[0]
        return logits

    def selected_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """As the seam."""

        def chunk(part: Tensor, wanted: Tensor, heat: Tensor | float) -> tuple[Tensor, Tensor]:
            logits = scaled(self.logits(part), heat)
            with torch.no_grad():
                entropy = from_logits(logits, wanted)[1]
            return torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0], entropy

        step = max(1, LOGITS // self.config.vocab)
        logp: list[Tensor] = [hidden.new_empty(0, dtype=torch.float32)]
        entropies = logp.copy()
        for at in range(0, len(targets), step):
            part = slice(at, at + step)
            heat = temperature[part] if isinstance(temperature, Tensor) and temperature.ndim else temperature
            arguments = hidden[part], targets[part], heat
            more = (
                chunk(*arguments)[:2]
                if not torch.is_grad_enabled()
                else checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
            logp.append(more[0])
            entropies.append(more[1])
        return torch.cat(logp), torch.cat(entropies)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """As the seam. By rows where the folder has the published names; otherwise as the library reads it. An adapter
        keeps its own weights."""
        views = {name: view for name, view in self.views().items() if not low_rank.is_published(name)}
        pieces = Pieces(self.config, Path(folder), {name: tuple(view.shape) for name, view in views.items()})
        if pieces.whole:
            for name, view in views.items():
                view.copy_(pieces.rows(name, 0, view.shape[:1].numel()))
            return
        loaded, missing = _loaded(self.inner, folder)
        named = self.inner.named_parameters()
        ours = {adapter.plain(name): parameter for name, parameter in named if not low_rank.is_adapter(name)}
        theirs = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        if lost := sorted(missing & set(ours)):
            raise CheckpointError(f"{folder}: {len(lost)} tensors are missing; the first is {lost[0]}")
        for name, parameter in ours.items():
            if parameter.shape != theirs[name].shape:
                raise CheckpointError(
                    f"{folder}, {name}: expected shape {list(parameter.shape)}, got {list(theirs[name].shape)}"
                )
            parameter.copy_(theirs[name])


def merged(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `provider.merged`."""
    if config.adapter is None:
        return dict(tensors)
    model = HuggingModel(config, Numerics(exact=False, reason="it computes nothing", fingerprint=""))
    model.load_state(tensors)
    adapter.merge(model.inner)
    return {name: view for name, view in model.views().items() if not low_rank.is_published(name)}


def _loaded(model: Any, folder: str | Path) -> tuple[Any, set[str]]:
    """The library's own reading of a folder, and the names that it has no tensors of."""
    config = copy.deepcopy(model.config)
    asked: dict[str, Any] = {}
    try:
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        if quantised := raw.get("quantization_config"):  # MXFP4: `shape.read` takes no other format
            config.quantization_config = quantised
            asked["quantization_config"] = library.transformers().Mxfp4Config(dequantize=True)
        loaded, about = type(model).from_pretrained(
            str(folder),
            config=config,
            dtype=model.config.dtype,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
            **asked,
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: weights cannot be read: {type(error).__name__}: {error}") from None
    return loaded, set(about["missing_keys"])


class _Given(nn.Module):
    """A body whose result is known."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Any inputs."""
        return _Output(last_hidden_state=self.hidden)


class _Output(dict[str, Any]):
    """The result of a body: its hidden states, by name and by number, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("last_hidden_state" if key == 0 else key)


def rows(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences in batches of rows, longest first, with a limited share of padding; empty ones are left out."""
    batches: list[list[int]] = []
    tokens = longest = 0
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if not lengths[at]:
            continue
        if not batches or longest * (len(batches[-1]) + 1) * (1 - PADDING) > tokens + lengths[at]:
            batches.append([])
            tokens, longest = 0, lengths[at]
        batches[-1].append(at)
        tokens += lengths[at]
    return batches
