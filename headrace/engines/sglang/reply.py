"""The requests and replies of SGLang's /generate.

The server ignores a misspelled request key without an error, so a reply without routed experts means that they were not
requested or not recorded. Routes come as base64 of little-endian int32 [rows, all layers, top_k], 2,048 bytes per token
for a large model. Log-probabilities come from the whole distribution at the request's temperature (temperature 1 for
greedy draws). That is the sampled distribution as long as nothing truncates it, and `body` sets every parameter that
could.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engines.server.backend import Ask, Attempt, Stretch
from headrace.engines.server.reply import checked, garbled
from headrace.policy.config import PolicyConfig

EVENTS = 512
"""Events of a turn whose tokens are followed, at most."""
PIECE = 1 << 18
"""Characters of base64 that are decoded at a time: a multiple of four."""


def body(ask: Ask, *, sparse: bool, seeded: bool, priority: int | None) -> dict[str, Any]:
    """The JSON of POST /generate. sparse: request routes; seeded: send the seed; priority: None for a server without
    priority scheduling."""
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.left,
        "temperature": ask.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(ask.stops),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        # Each event repeats all earlier tokens: with more events than one for the first token, which is sent at once,
        # and one for all, a turn's bytes would grow with the square of its tokens.
        "stream_interval": max(1, ask.left // EVENTS if ask.followed else ask.left),
    }
    if ask.answer:
        sampling["json_schema"] = ask.answer
    if seeded:
        sampling["sampling_seed"] = ask.seed % (1 << 31)
    routes = {"return_routed_experts": True, "routed_experts_start_len": ask.start} if sparse else {}
    return {
        "rid": ask.rid,
        "input_ids": list(ask.ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
        "cache_salt": ask.salt,
        **({} if priority is None else {"priority": priority}),
        **routes,
    }


def read(reply: Mapping[str, Any], ask: Ask, config: PolicyConfig) -> Attempt:
    """The attempt in a reply. ServerError `garbled`."""
    try:
        meta = reply["meta_info"]
        ids = list(reply["output_ids"])
        pairs = meta.get("output_token_logprobs") or []
        ending = meta["finish_reason"]["type"]
        named, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        end = _grammars_end(logprobs) if ask.answer else len(ids)
        stretches = [
            Stretch(str(span["version"]), span["start"], min(span["end"], end))
            for span in meta.get("weight_versions") or []
            if span["start"] < min(span["end"], end)
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise garbled(f"the reply lacks {error}") from None
    if named != ids:
        raise garbled(f"the {len(pairs)} log-probabilities name other ids than the {len(ids)} sampled ones")
    count = len(ask.ids) + len(ids) - 1 - ask.start
    coded = meta.get("routed_experts") if config.experts and ids else None
    rows = _rows(coded, (count, config.layers, config.top_k)) if coded else None
    return checked(
        ask,
        config,
        ids=ids[:end],
        logprobs=logprobs[:end],
        stretches=stretches,
        finish=ending if end == len(ids) else "stop",
        rows=rows if rows is None else rows[: count - len(ids) + end],
        cached=int(meta.get("cached_tokens") or 0),
        retractions=int(meta.get("num_retractions") or 0),
    )


def _grammars_end(logprobs: Sequence[Any]) -> int:
    """The number of tokens up to the end of a grammar. A server whose tokenizer names no end of a turn allows no token
    behind it, and its log-probabilities are no numbers there."""
    wrong = (at for at, value in enumerate(logprobs) if type(value) is not float or not math.isfinite(value))
    return next(wrong, len(logprobs))


def _rows(coded: str, shape: tuple[int, int, int]) -> NDArray[np.signedinteger]:
    try:
        # In pieces, because base64 holds the interpreter lock while it decodes one: 60 ms for 17 MB.
        pieces = (coded[at : at + PIECE] for at in range(0, len(coded), PIECE))
        return np.frombuffer(b"".join(base64.b64decode(piece, validate=True) for piece in pieces), "<i4").reshape(shape)
    except (ValueError, TypeError, binascii.Error):
        raise garbled(f"routed_experts are not base64 of int32 {list(shape)}") from None
