"""The policy of the gateway for each key of a request, by dialect; docs/request_keys.md is made of these tables.

A key is honoured, refused, or harmless and left out. A refused key may have its neutral values, which ask for nothing.
An unknown key is left out as well. Nothing is left out in silence: the answer names the keys in the header
`X-Headrace-Left-Out`.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from headrace.gateway.dialects.base import Body, Unusable

NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""Values that ask for nothing. An absent key is None."""


class Key(NamedTuple):
    """The policy of one key."""

    policy: Literal["honoured", "refused", "left out"]
    why: str = ""
    neutral: tuple[object, ...] = ()
    """Further values of a refused key that ask for nothing."""


HONOURED = Key("honoured")
_OWN = "the policy samples from its own distribution, at the temperature that is asked"
_SAMPLING = Key("left out", _OWN)
_VENDOR = Key("left out", "it concerns the vendor's servers")
_EFFORT = Key("left out", "the model decides how long it reasons")
_HINT = Key("left out", "a hint about caches; the engine reuses every prefix that it holds")
_FORMAT = "text, json_object or json_schema, by the grammar of SGLang or vLLM; the embedded engine refuses a format"
_FORCED = "none, auto, any (required) or a tool: the beginning of its call stands in the prompt"
_STOP = "the text ends before the first one"
_CONTAINER = "send the history as input, or previous_response_id"

_OPENAI: Mapping[str, Key] = {
    "tool_choice": Key("honoured", _FORCED),
    "parallel_tool_calls": Key("honoured", "false: the answer has the first call alone"),
    "metadata": Key("left out", "POST /v1/sessions takes metadata"),
    "top_logprobs": Key("refused", "expected 0; engines keep the log-probability of the sampled token alone", (0,)),
    "safety_identifier": Key("honoured", "where `user` is absent"),
    **dict.fromkeys(("model", "temperature", "stream", "user"), HONOURED),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), _HINT),
    "top_p": _SAMPLING,
    **dict.fromkeys(("verbosity", "reasoning"), _EFFORT),
    "service_tier": _VENDOR,
}
"""Keys of both of OpenAI's dialects."""

CHAT: Mapping[str, Key] = {
    **_OPENAI,
    "stream_options": Key("honoured", "include_usage"),
    "n": Key("honoured", "1 to 8 samples, branches of one tree; 1 with stream"),
    "stop": Key("honoured", _STOP),
    "logprobs": Key("honoured", "of the sampled tokens; in a stream they come with the last chunk"),
    "return_token_ids": Key("honoured", "as vLLM: prompt_token_ids, token_ids and routed_experts; and token_versions"),
    "response_format": Key("honoured", _FORMAT),
    "functions": Key("refused", "send tools instead"),
    "function_call": Key("refused", "send tool_choice instead", ("auto", "none")),
    "audio": Key("refused", "the model answers in text"),
    "modalities": Key("refused", "the model answers in text", (["text"],)),
    "web_search_options": Key("refused", "the gateway searches nothing; offer a tool that does"),
    "logit_bias": Key("refused", "the policy samples from its own distribution"),
    "seed": Key("left out", "each turn draws its own seed, which its record has"),
    "prediction": Key("left out", "it changes the speed alone"),
    **dict.fromkeys(("messages", "tools", "max_tokens", "max_completion_tokens"), HONOURED),
    **dict.fromkeys(("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _SAMPLING),
    **dict.fromkeys(("reasoning_effort", "thinking"), _EFFORT),
    "store": _VENDOR,
}

RESPONSES: Mapping[str, Key] = {
    **_OPENAI,
    "tools": Key("honoured", "functions; tools that only the vendor's servers run are left out"),
    "text": Key("honoured", f"format: {_FORMAT}"),
    "previous_response_id": Key("honoured", "a response of this gateway, as long as its record is kept"),
    "conversation": Key("refused", _CONTAINER),
    "prompt": Key("refused", _CONTAINER),
    "background": Key("refused", "expected false; a response is made while the client waits"),
    "max_tool_calls": Key("refused", "the client runs its tools, and can stop by itself"),
    "include": Key("honoured", "message.output_text.logprobs; the other values name what does not exist here"),
    "truncation": Key("left out", "a history that is too long is refused"),
    "context_management": Key("left out", "POST /v1/responses/compact compacts a history"),
    "store": Key("left out", "the record of a session has all of its turns"),
    **dict.fromkeys(("input", "instructions", "max_output_tokens"), HONOURED),
    **dict.fromkeys(("stream_options", "client_metadata"), _VENDOR),
}

MESSAGES: Mapping[str, Key] = {
    "tools": Key("honoured", "custom tools; tools that only the vendor's servers run are left out"),
    "tool_choice": Key("honoured", f"{_FORCED}; disable_parallel_tool_use: the answer has the first call alone"),
    "metadata": Key("honoured", "user_id"),
    "stop_sequences": Key("honoured", _STOP),
    "output_format": Key("honoured", _FORMAT),
    "output_config": Key("honoured", f"format: {_FORMAT}; effort: {_EFFORT.why}"),
    "mcp_servers": Key("refused", "the gateway calls no server; offer the server's tools"),
    "container": Key("refused", "the gateway has no container of a client"),
    "context_management": Key("left out", "the client compacts its own history"),
    **dict.fromkeys(("model", "messages", "system", "max_tokens", "temperature", "stream"), HONOURED),
    **dict.fromkeys(("top_p", "top_k"), _SAMPLING),
    "thinking": _EFFORT,
    "cache_control": _HINT,
    **dict.fromkeys(("inference_geo", "service_tier", "speed"), _VENDOR),
}

TABLES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


def left_out(body: Body, table: Mapping[str, Key]) -> tuple[str, ...]:
    """The keys of a request that are left out, sorted. Unusable for a refused key that asks for something."""
    out: list[str] = []
    for name, value in body.items():
        key = table.get(name)
        if key is not None and key.policy == "refused":
            if not any(_same(value, neutral) for neutral in (*NOTHING, *key.neutral)):
                raise Unusable(f"{name}: {key.why}", name)
        elif (key is None or key.policy == "left out") and not any(_same(value, neutral) for neutral in NOTHING):
            out.append(name)
    return tuple(sorted(out))


def _same(value: object, other: object) -> bool:
    """Equality that tells 0 and 1 from false and true."""
    return type(value) is type(other) and value == other


def page() -> str:
    """docs/request_keys.md."""
    lines = ["# Keys of a client's request", "", "Made of headrace/gateway/dialects/keys.py by `make docs`.", ""]
    lines += [
        "The gateway honours a key, refuses a request with it (status 400), or leaves it out because it is harmless.",
        "An unknown key is left out. The header `X-Headrace-Left-Out` of the answer names what was left out.",
    ]
    for path, table in TABLES.items():
        lines += ["", f"## POST {path}", "", "| key | policy | |", "|---|---|---|"]
        lines += [f"| `{name}` | {key.policy} | {key.why} |" for name, key in table.items()]
    return "\n".join(lines) + "\n"
