"""OpenAI chat completions: ``POST /v1/chat/completions``.

One message contains all tool calls of a turn, each with its index. A stream ends with ``data: [DONE]``; if the client
asks for usage, a chunk without choices precedes it.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects import base
from headrace.gateway.dialects.base import Body, Unusable, event
from headrace.gateway.dialects.keys import CHAT, left_out
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.base import Array
from headrace.messages.product import ClientCall, ClientMessage, ClientTool, ClientUsage

_FINISH = {"stop": "stop", "calls": "tool_calls", "length": "length"}
_KINDS = ("text", "refusal")
MOST_SAMPLES = 8


class ChatCompletions:
    """The dialect of mini-swe-agent, aider, LiteLLM and most user interfaces."""

    path = "/v1/chat/completions"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        skipped = left_out(body, CHAT)
        entries = base.objects(body.get("messages"), "messages")
        if not entries:
            raise Unusable("messages: expected at least one message", "messages")
        base.no_attachment(entries[-1].get("content") if entries[-1].get("role") == "user" else None, "messages")
        messages = tuple(_message(entry, index) for index, entry in enumerate(entries))
        longest = body.get("max_completion_tokens")
        options = body.get("stream_options")
        tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(base.offered(body)))
        stream = base.flag(body.get("stream"), "stream")
        samples = base.whole_number(body.get("n"), "n", most=MOST_SAMPLES) or 1
        if stream and samples > 1:
            raise Unusable("n: expected 1 with stream; several choices come whole", "n")
        return ModelRequest(
            model=base.string(body.get("model"), "model"),
            messages=messages,
            tools=tools,
            forced=base.forced(body, [tool.name for tool in tools]),
            stops=base.stops(body.get("stop"), "stop"),
            answer=base.answer_schema(body.get("response_format"), "response_format"),
            logprobs=base.flag(body.get("logprobs"), "logprobs"),
            tokens=base.flag(body.get("return_token_ids"), "return_token_ids"),
            samples=samples,
            parallel=base.flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
            max_tokens=base.whole_number(body.get("max_tokens") if longest is None else longest, "max_tokens"),
            temperature=base.temperature(body.get("temperature")),
            stream=stream,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            user=base.end_user(body),
            left_out=skipped,
        )

    def reply(self, replies: Sequence[ModelReply], request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.reply`."""
        choices = []
        for index, reply in enumerate(replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.said or None, "refusal": None}
            if reply.thinking:
                message["reasoning_content"] = reply.thinking
            if reply.calls:
                message["tool_calls"] = [_call(call) for call in reply.calls]
            choice = {"index": index, "message": message, "finish_reason": _FINISH[reply.stop]}
            choices.append(choice | {"logprobs": _logprobs(reply, request)} | _tokens(reply))
        return (
            _head(replies[0], "chat.completion") | _prompt(replies[0]) | {"choices": choices, "usage": _usage(replies)}
        )

    def writer(self, request: ModelRequest, head: Head) -> Writer:
        """See `Dialect.writer`."""
        return _Writer(request, head)


class _Writer(Writer):
    """Chunks with one delta each. Thinking is in `reasoning_content`, as DeepSeek, vLLM and SGLang have it."""

    def _chunk(self, delta: dict[str, Any], end: ModelReply | None = None) -> Iterator[bytes]:
        """end: the whole reply, with the last delta."""
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        more: dict[str, Any] = {"usage": None} if self.request.include_usage else {}
        if end is not None:
            choice |= {"finish_reason": _FINISH[end.stop], "logprobs": _logprobs(end, self.request)} | _tokens(end)
            more |= _prompt(end)
        yield event(self._head() | {"choices": [choice]} | more)

    def _head(self) -> dict[str, Any]:
        return _head(self.head, "chat.completion.chunk")

    def begin(self, usage: ClientUsage) -> Iterator[bytes]:
        """See `Writer.begin`."""
        return self._chunk({"role": "assistant", "content": ""})

    def think(self, piece: str) -> Iterator[bytes]:
        """See `Writer.think`."""
        return self._chunk({"reasoning_content": piece})

    def say(self, piece: str) -> Iterator[bytes]:
        """See `Writer.say`."""
        return self._chunk({"content": piece})

    def call(self, index: int, begun: ClientCall) -> Iterator[bytes]:
        """See `Writer.call`."""
        return self._chunk({"tool_calls": [{"index": index} | _call(begun)]})

    def argue(self, index: int, piece: str) -> Iterator[bytes]:
        """See `Writer.argue`."""
        return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})

    def add(self, piece: str) -> Iterator[bytes]:
        """See `Writer.add`."""
        return self._chunk({"content": f"\n{piece}" if self.text else piece})

    def finish(self, reply: ModelReply) -> Iterator[bytes]:
        """See `Writer.finish`."""
        yield from self._chunk({}, reply)
        if self.request.include_usage:
            yield event(self._head() | {"choices": [], "usage": _usage([reply])})
        yield b"data: [DONE]\n\n"

    def fail(self, status: int, text: str) -> Iterator[bytes]:
        """See `Writer.fail`."""
        yield event(base.openai_error(status, text))
        yield b"data: [DONE]\n\n"


def _head(reply: ModelReply | Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _logprobs(reply: ModelReply, request: ModelRequest) -> dict[str, Any] | None:
    """Log-probabilities of the text's tokens; with token ids asked for, of every id, named as vLLM names it."""
    if not request.logprobs:
        return None
    if reply.tokens is None:
        return {"content": base.logprobs_of(reply), "refusal": None}
    pairs = zip(reply.tokens.ids.tolist(), reply.tokens.logprobs.tolist(), strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{id}", "logprob": logprob, "bytes": None, "top_logprobs": []} for id, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def _prompt(reply: ModelReply) -> dict[str, Any]:
    return {} if reply.tokens is None else {"prompt_token_ids": reply.tokens.prompt_ids.tolist()}


def _tokens(reply: ModelReply) -> dict[str, Any]:
    """The tokens of a turn in vLLM's fields; `routed_experts` is a base64 .npy of prompt and turn without
    the last id, which no forward read."""
    tokens = reply.tokens
    if tokens is None:
        return {}
    routes = None if tokens.routed is None else base64.b64encode(_npy(tokens.routed)).decode()
    return {"token_ids": tokens.ids.tolist(), "token_versions": tokens.versions.tolist(), "routed_experts": routes}


def _npy(values: Array) -> bytes:
    """An array in numpy's file format 1.0."""
    head = f"{{'descr': '{values.dtype}', 'fortran_order': False, 'shape': ({', '.join(map(str, values.shape))},), }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + values.data


def _usage(replies: Sequence[ModelReply]) -> dict[str, Any]:
    usage, sampled = replies[0].usage, sum(reply.usage.sampled for reply in replies)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": sampled,
        "total_tokens": usage.prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _call(call: ClientCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(entry: dict[str, Any], field: str) -> ClientTool:
    tool = entry.get("function")
    if entry.get("type") != "function" or not isinstance(tool, dict):
        raise Unusable(f"{field}: expected a tool of type 'function'", "tools")
    return base.tool_of(tool, "parameters", f"{field}.function")


def _message(entry: dict[str, Any], index: int) -> ClientMessage:
    field = f"messages[{index}]"
    role, text = entry.get("role"), base.text_of(entry.get("content"), f"{field}.content", _KINDS)
    if role in ("system", "developer"):
        return ClientMessage(role="system", text=text)
    if role == "user":
        return ClientMessage(role="user", text=text)
    if role == "tool":
        return ClientMessage(
            role="tool", text=text, call_id=base.string(entry.get("tool_call_id"), f"{field}.tool_call_id")
        )
    if role != "assistant":
        raise Unusable(f"{field}.role: expected system, developer, user, assistant or tool, got {role!r}", "messages")
    calls: list[ClientCall] = []
    for number, call in enumerate(base.objects(entry.get("tool_calls"), f"{field}.tool_calls")):
        function = call.get("function")
        if not isinstance(function, dict):
            raise Unusable(f"{field}.tool_calls[{number}].function: expected an object", "messages")
        calls.append(
            ClientCall(
                id=base.string(call.get("id"), f"{field}.tool_calls[{number}].id"),
                name=base.string(function.get("name"), f"{field}.tool_calls[{number}].function.name"),
                arguments=base.arguments(function.get("arguments"), f"{field}.tool_calls[{number}].function.arguments"),
            )
        )
    return ClientMessage(role="assistant", text=text, calls=tuple(calls))
