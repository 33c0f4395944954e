"""Reads ids, log-probabilities, routed experts and versions, which the trainer needs, from a reply of /generate.

Everything is checked here, because later code cannot detect errors: the server ignores a misspelled request key without
an error, so a reply without routed experts means that they were not requested or not recorded.

The server sends routes as base64 of little-endian int32 [rows, all layers, top_k], 2,048 bytes per token for a large
model. They are converted to headrace's compact form, without the dense layers and with one byte per expert (two above
255 experts). The server's log-probabilities are those of the whole distribution at the request's temperature
(temperature 1 for greedy draws). That is the sampled distribution as long as nothing truncates it, and `body` sets
every parameter that could.

Trap: memory pressure makes the server retract a request and forward it again. When weights changed in between, the
server reports routes of the new weights for tokens that the old weights sampled. Such rows are marked as not recorded.
"""

import asyncio
import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engines.base import SampleRequest
from headrace.engines.sglang.http import LARGE, ServerError
from headrace.policy.config import PolicyConfig

EVENTS = 512
"""Events of a turn whose tokens are followed, at most."""
PIECE = 1 << 18
"""Characters of base64 that are decoded at a time: a multiple of four."""


class Stretch(NamedTuple):
    """The weights with this label sampled the tokens start..end-1 of an attempt."""

    label: str
    start: int
    end: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to one request of a turn."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rows: NDArray[np.unsignedinteger] | None
    """Routed experts [positions forwarded from `start` on, sparse layers, top_k]; None for a dense model or without
    tokens."""
    stretches: tuple[Stretch, ...]
    finish: Literal["stop", "length", "abort"]
    cached: int
    retractions: int


def body(
    request: SampleRequest,
    ids: Sequence[int],
    left: int,
    *,
    rid: str,
    start: int,
    salt: str,
    sparse: bool,
    seeded: bool,
    priority: int | None = None,
) -> dict[str, Any]:
    """The JSON of POST /generate. ids: the context; left: largest number of tokens to sample; start: first position
    whose routes are requested; salt: of the prefix-cache keys; sparse: request routes; seeded: send the seed; priority:
    None for a server without priority scheduling.

    Every value that changes the distribution is set, so that no default of a server or a model applies.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": left,
        "temperature": request.sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(request.stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        # Each event repeats all earlier tokens: with more events than one for the first token, which is sent at once,
        # and one for all, a turn's bytes would grow with the square of its tokens.
        "stream_interval": max(1, left // EVENTS if request.progress and request.progress.followed else left),
    }
    if seeded:
        sampling["sampling_seed"] = request.seed % (1 << 31)
    routes = {"return_routed_experts": True, "routed_experts_start_len": start} if sparse else {}
    return {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "cache_salt": salt,
        **({} if priority is None else {"priority": priority}),
        **routes,
    }


async def attempt_of(
    reply: Mapping[str, Any], prompt: int, start: int, config: PolicyConfig, stops: Sequence[int]
) -> Attempt:
    """`read`, in a thread when the reply has many routes, so that the event loop serves other turns meanwhile."""
    meta = reply.get("meta_info")
    coded = meta.get("routed_experts") if isinstance(meta, Mapping) else None
    work = partial(read, reply, prompt=prompt, start=start, config=config, stops=stops)
    return await asyncio.to_thread(work) if len(coded or "") >= LARGE else work()


def read(reply: Mapping[str, Any], *, prompt: int, start: int, config: PolicyConfig, stops: Sequence[int]) -> Attempt:
    """The attempt in a finished reply to `prompt` context tokens with routes from `start` on.

    ServerError of kind `garbled` when the reply is incomplete or contradicts itself.
    """
    try:
        meta = reply["meta_info"]
        ids = tuple(reply["output_ids"])
        ending = meta["finish_reason"]
        finish = ending["type"]
        pairs = meta.get("output_token_logprobs") or []
        stretches = tuple(
            Stretch(str(span["version"]), span["start"], min(span["end"], len(ids)))
            for span in meta.get("weight_versions") or []
            if span["start"] < min(span["end"], len(ids))
        )
    except (KeyError, TypeError) as error:
        raise _garbled(f"the reply lacks {error}") from None
    if finish not in ("stop", "length", "abort"):
        raise _garbled(f"expected finish_reason stop, length or abort, got {finish!r}")
    if any(not isinstance(token, int) or not 0 <= token < config.vocab for token in ids):
        raise _garbled(f"a sampled id is outside the vocabulary of {config.vocab}: the server serves another model")
    if [pair[1] for pair in pairs] != list(ids):
        raise _garbled(f"the {len(pairs)} log-probabilities are not those of the {len(ids)} sampled ids")
    if any(pair[0] is None or not math.isfinite(pair[0]) for pair in pairs):
        raise _garbled("a log-probability is not finite: the weights give logits that are not finite")
    covered = [index for stretch in stretches for index in range(stretch.start, stretch.end)]
    if covered != list(range(len(ids))):
        raise _garbled(f"weight_versions, the versions that sampled each token, do not cover the {len(ids)} tokens")
    if finish == "stop" and (not ids or ids[-1] not in stops):
        raise _garbled(
            f"the server stopped at a token that is no stop id ({ending.get('matched')}); serve the model without "
            f"eos_token_id"
        )
    retractions = int(meta.get("num_retractions") or 0)
    rows = None
    if config.experts and ids:
        rows = _rows(meta, prompt + len(ids) - 1 - start, config)
        if retractions and len(stretches) > 1:
            rows[: max(0, prompt - 1 + stretches[-1].start - start)] = _none(config)
    return Attempt(
        ids=ids,
        logprobs=tuple(float(np.float32(pair[0])) for pair in pairs),
        rows=rows,
        stretches=stretches,
        finish=finish,
        cached=int(meta.get("cached_tokens") or 0),
        retractions=retractions,
    )


def _rows(meta: Mapping[str, Any], count: int, config: PolicyConfig) -> NDArray[np.unsignedinteger]:
    """Routes in compact form [count, sparse layers, top_k]; the dtype's largest value means not recorded."""
    coded = meta.get("routed_experts")
    if not coded:
        raise _garbled(
            "the reply has no routed_experts; start the server with --enable-return-routed-experts, because a mixture "
            "cannot be trained without them"
        )
    shape = (count, config.layers, config.top_k)
    try:
        # In pieces, because base64 holds the interpreter lock while it decodes one: 60 ms for 17 MB.
        pieces = (coded[at : at + PIECE] for at in range(0, len(coded), PIECE))
        flat = np.frombuffer(b"".join(base64.b64decode(piece, validate=True) for piece in pieces), "<i4")
        wide = flat.reshape(shape)[:, config.dense_layers :]
    except (ValueError, binascii.Error):
        raise _garbled(f"routed_experts are not base64 of int32 {list(shape)}") from None
    if wide.size and (wide.min() < -1 or wide.max() >= config.experts):
        raise _garbled(f"routed_experts name experts {wide.min()} to {wide.max()}, the model has {config.experts}")
    return np.where(wide < 0, _none(config), wide).astype(config.routed_dtype)


def _none(config: PolicyConfig) -> int:
    return int(np.iinfo(np.dtype(config.routed_dtype)).max)


def _garbled(text: str) -> ServerError:
    return ServerError("garbled", text)
