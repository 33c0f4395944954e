"""Checks a reply, because later code cannot detect errors: ids, log-probabilities, versions and routes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engines.server.backend import Ask, Attempt, Stretch
from headrace.engines.server.http import ServerError
from headrace.policy import routes
from headrace.policy.config import PolicyConfig

ROUNDING = 1e-6
"""The largest log-probability above 0 that rounding explains; it counts as 0."""


def checked(
    ask: Ask,
    config: PolicyConfig,
    *,
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    stretches: Sequence[Stretch],
    finish: Any,
    rows: NDArray[np.signedinteger] | None = None,
    cached: int = 0,
    retractions: int = 0,
) -> Attempt:
    """An attempt from a server's answer. rows: routes [positions, all layers, top_k], -1 where none is recorded.

    ServerError `garbled` when it cannot be used. Routes of a request that was forwarded again with other weights are
    marked as not recorded: the server reports routes of the new weights for tokens that the old ones sampled.
    """
    if finish not in ("stop", "length", "abort"):
        raise garbled(f"expected finish_reason stop, length or abort, got {finish!r}")
    if any(type(token) is not int or not 0 <= token < config.vocab for token in ids):
        raise garbled(f"a sampled id is outside the vocabulary of {config.vocab}: the server serves another model")
    if len(ids) > ask.left:
        raise garbled(f"{len(ids)} ids were sampled, and {ask.left} requested")
    if len(logprobs) != len(ids):
        raise garbled(f"the {len(logprobs)} log-probabilities name other ids than the {len(ids)} sampled ones")
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in logprobs):
        raise garbled("a log-probability is not finite: the weights give logits that are not finite")
    if any(value > ROUNDING for value in logprobs):
        raise garbled(f"a log-probability is {max(logprobs)}, expected at most 0: the server reports another figure")
    if [index for stretch in stretches for index in range(stretch.start, stretch.end)] != list(range(len(ids))):
        raise garbled(f"weight_versions, the versions that sampled each token, do not cover the {len(ids)} tokens")
    if any(token in ask.stops for token in ids[:-1]):
        raise garbled("the server sampled on behind a stop id")
    if finish == "stop" and not ask.answer and (not ids or ids[-1] not in ask.stops):  # a grammar may end it earlier
        raise garbled("the server stopped at a token that is no stop id; serve the model without eos_token_id")
    compact = None
    if config.experts and ids:
        count = len(ask.ids) + len(ids) - 1 - ask.start
        compact = _compact(rows, count, config)
        if retractions and len(stretches) > 1:
            compact[: max(0, len(ask.ids) - 1 + stretches[-1].start - ask.start)] = _none(config)
    return Attempt(
        ids=tuple(ids),
        logprobs=tuple(min(0.0, float(np.float32(value))) for value in logprobs),
        rows=compact,
        stretches=tuple(stretches),
        finish=finish,
        cached=cached,
        retractions=retractions,
    )


def _compact(rows: NDArray[np.signedinteger] | None, count: int, config: PolicyConfig) -> NDArray[np.unsignedinteger]:
    """Routes [count, sparse layers, top_k], with one byte per expert or two above 255 experts, in ascending order."""
    if rows is None:
        raise garbled(
            "the reply has no routed_experts; start the server with --enable-return-routed-experts, because a mixture "
            "cannot be trained without them"
        )
    shape = (count, config.layers, config.top_k)
    if rows.shape != shape:
        raise garbled(f"expected routed_experts {list(shape)}, got {list(rows.shape)}")
    wide = rows[:, config.dense_layers :]
    if wide.size and (wide.min() < -1 or wide.max() >= config.experts):
        raise garbled(f"routed_experts name experts {wide.min()} to {wide.max()}, the model has {config.experts}")
    narrow = np.where(wide < 0, _none(config), wide).astype(config.routed_dtype)
    ordered: NDArray[np.unsignedinteger] = routes.ascending(narrow)
    return ordered


def _none(config: PolicyConfig) -> int:
    return int(np.iinfo(np.dtype(config.routed_dtype)).max)


def garbled(text: str) -> ServerError:
    """A reply that cannot be used."""
    return ServerError("garbled", text)
