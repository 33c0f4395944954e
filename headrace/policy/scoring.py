"""Law 5: score a recorded segment again, with the weights that wrote it, and get the sampler's own bits.

Idea: after a swap in flight, the positions of the KV cache come from different versions. Scoring with the newest
weights alone would therefore differ from the sampler by staleness, not by arithmetic. So the recorded spans are taken
in order: each is computed with the version that its record names, over a cache that is kept from span to span, and
gives the log-probabilities of its tokens. In exact mode they equal the sampler's bit for bit; any difference is a
mismatch.

Some positions were computed more than once (a successor on another node starts with an empty cache). The first forward
of a position gives the log-probability of the next token, because the sampler drew the token from it; later forwards
only replace keys and values, as they did in the sampler.

A long span is forwarded in pieces over the cache, so that memory holds the cache of the segment and the activations of
one piece. In exact mode pieces change no bit: a sampler prefills in pieces too.
Trade-off: a segment with several versions needs all of their weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.kernels import dispatch
from headrace.kernels.block_attention import BLOCK
from headrace.messages.rollout import Span
from headrace.policy.provider import new_cache
from headrace.policy.seam import PolicyModel

PIECE = 4096
"""Most positions of one forward pass: enough rows for a GPU, and for 64k tokens a sixteenth of their activations."""


class ScoringError(HeadraceError):
    """The record cannot be scored: a version is missing, or spans do not cover a target."""


def score(
    models: Mapping[int, PolicyModel],
    ids: Sequence[int] | Tensor,
    spans: Iterable[Span],
    targets: Sequence[int],
    temperature: float,
    routed: Tensor | None = None,
    recorder: list[Tensor] | None = None,
    piece: int = PIECE,
) -> Tensor:
    """Log-probabilities float32 [len(targets)], on the CPU, of the tokens at positions `targets` (ascending, none 0) of
    a segment.

    models: by version, for every version in `spans`. ids: the whole segment. spans: over its turns, in record order.
    routed [len(ids) or fewer, L, k]: selections to replay by position; None routes live.
    recorder: of a mixture, gets one int64 [positions, L, k] on the CPU: the experts used in each position's first
    forward. piece: most positions of one forward pass.
    ScoringError as said there.
    """
    if not models:
        raise ScoringError("no weights to score with")
    device = models[max(models)].device
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    ordered = [span for span in spans if span.end > span.start]
    missing = sorted({span.version for span in ordered} - set(models))
    if missing:
        raise ScoringError(f"no weights for version {missing[0]}: spans name it, it was not kept")
    if not len(targets):
        return torch.empty(0)
    wanted = torch.as_tensor(targets, dtype=torch.int64)
    last = 0
    for span in ordered:
        if span.start > last:
            raise ScoringError(f"spans leave positions {last} to {span.start} without a forward")
        last = max(last, span.end)
    if last > len(tokens) or int(wanted[-1]) > last or int(wanted[0]) < 1:
        raise ScoringError(f"spans end at {last}; ids are {len(tokens)}, targets {int(wanted[0])} to {int(wanted[-1])}")
    out = torch.full((len(wanted),), torch.nan)
    cache, table, covered = None, [*range((last + BLOCK - 1) // BLOCK)], 0
    routes: list[Tensor] = []
    with torch.no_grad():
        for span in dispatch.repeated([part for whole in ordered for part in _pieces(whole, piece)]):
            model = models[span.version]
            cache = cache or new_cache(model.config, len(table), device)
            layers: list[Tensor] = []
            hidden = model.forward_cached(
                tokens[span.start : span.end].to(device),
                [span.end - span.start],
                [span.start],
                [table],
                cache,
                None if routed is None else routed[span.start : span.end].to(device),
                layers,
            )
            if layers and span.end > covered:
                routes.append(torch.stack(layers, 1)[max(covered - span.start, 0) :].cpu())
            first, end = torch.searchsorted(wanted, torch.tensor([max(span.start, covered) + 1, span.end + 1])).tolist()
            if end > first:
                chosen = wanted[first:end]
                rows, selected = (chosen - 1 - span.start).to(device), tokens[chosen].to(device)
                logp, _ = model.selected_logprobs(hidden[rows], selected, temperature)
                out[first:end] = logp.cpu()
            covered = max(covered, span.end)
    if recorder is not None and routes:
        recorder.append(torch.cat(routes))
    return out


def _pieces(span: Span, most: int) -> Iterator[Span]:
    """A span as consecutive spans of at most so many positions."""
    for start in range(span.start, span.end, most):
        yield Span(start, min(start + most, span.end), span.version)
