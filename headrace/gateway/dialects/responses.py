"""OpenAI responses: ``POST /v1/responses``, the only dialect of Codex.

The dialect is stateless: the client sends its whole history as items each turn, so a ``previous_response_id`` is
refused. Items that a text model cannot use (reasoning of another model) and tools that only OpenAI's servers run
(web search, images) are left out. A stream numbers its events and has no ``[DONE]``.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects.base import (
    Body,
    Unusable,
    arguments,
    event,
    objects,
    offered_tools,
    string,
    temperature,
    text_of,
    whole_number,
)
from headrace.messages.product import ClientCall, ClientMessage

_KINDS = ("input_text", "output_text", "text")
_IGNORED = ("reasoning", "web_search_call", "local_shell_call", "compaction")


class Responses:
    """The dialect of the Codex command line and of OpenAI's Agents SDK."""

    path = "/v1/responses"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        if body.get("previous_response_id"):
            raise Unusable(
                "previous_response_id: nothing is stored; send the whole history as input", "previous_response_id"
            )
        if body.get("background") is True:
            raise Unusable("background: expected false; a response is made while the client waits", "background")
        messages: list[ClientMessage] = []
        if instructions := string(body.get("instructions"), "instructions"):
            messages.append(ClientMessage(role="system", text=instructions))
        given = body.get("input")
        if isinstance(given, str):
            messages.append(ClientMessage(role="user", text=string(given, "input")))
        else:
            for index, item in enumerate(objects(given, "input")):
                _add(messages, item, f"input[{index}]")
        if not any(said.role != "system" for said in messages):
            raise Unusable("input: expected a text or at least one message", "input")
        metadata = body.get("metadata")
        return ModelRequest(
            model=string(body.get("model"), "model"),
            messages=tuple(messages),
            tools=offered_tools(body, "function", "parameters"),
            max_tokens=whole_number(body.get("max_output_tokens"), "max_output_tokens"),
            temperature=temperature(body.get("temperature")),
            stream=body.get("stream") is True,
            session=string(body.get("prompt_cache_key"), "prompt_cache_key")
            or string(metadata.get("session_id") if isinstance(metadata, dict) else None, "metadata.session_id"),
            user=string(body.get("user"), "user"),
        )

    def reply(self, reply: ModelReply) -> dict[str, Any]:
        """See `Dialect.reply`."""
        incomplete = {"reason": "max_output_tokens"} if reply.stop == "length" else None
        return _head(reply, "incomplete" if incomplete else "completed", _items(reply)) | {
            "incomplete_details": incomplete,
            "usage": _usage(reply),
        }

    def events(self, reply: ModelReply, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.events`."""
        count = itertools.count()

        def say(kind: str, /, **data: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(count)} | data, kind)

        started = _head(reply, "in_progress", [])
        yield say("response.created", response=started)
        yield say("response.in_progress", response=started)
        for index, item in enumerate(_items(reply)):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                part = {"type": "output_text", "text": "", "annotations": []}
                yield say(
                    "response.output_item.added",
                    output_index=index,
                    item=item | {"status": "in_progress", "content": []},
                )
                yield say("response.content_part.added", **place, content_index=0, part=part)
                yield say("response.output_text.delta", **place, content_index=0, delta=reply.text, logprobs=[])
                yield say("response.output_text.done", **place, content_index=0, text=reply.text, logprobs=[])
                yield say("response.content_part.done", **place, content_index=0, part=part | {"text": reply.text})
            else:
                yield say(
                    "response.output_item.added",
                    output_index=index,
                    item=item | {"status": "in_progress", "arguments": ""},
                )
                yield say("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield say(
                    "response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"]
                )
            yield say("response.output_item.done", output_index=index, item=item)
        name = "response.incomplete" if reply.stop == "length" else "response.completed"
        yield say(name, response=self.reply(reply))

    def error(self, status: int, text: str, field: str = "") -> dict[str, Any]:
        """See `Dialect.error`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": text, "type": kind, "param": field or None, "code": _CODES.get(status)}}


_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def _head(reply: ModelReply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _items(reply: ModelReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        )
    for index, call in enumerate(reply.calls):
        items.append(
            {
                "id": f"fc_{reply.id}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return items


def _usage(reply: ModelReply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.sampled,
    }


def _add(messages: list[ClientMessage], item: dict[str, Any], field: str) -> None:
    """Append an item to the history. Consecutive calls of a turn join the assistant's message that precedes them."""
    kind = item.get("type", "message")
    if kind in _IGNORED:
        return
    if kind == "function_call":
        call = ClientCall(
            id=string(item.get("call_id"), f"{field}.call_id"),
            name=string(item.get("name"), f"{field}.name"),
            arguments=arguments(item.get("arguments"), f"{field}.arguments"),
        )
        if messages and messages[-1].role == "assistant":
            messages[-1] = msgspec.structs.replace(messages[-1], calls=(*messages[-1].calls, call))
        else:
            messages.append(ClientMessage(role="assistant", calls=(call,)))
    elif kind == "function_call_output":
        messages.append(
            ClientMessage(
                role="tool",
                text=text_of(item.get("output"), f"{field}.output", _KINDS),
                call_id=string(item.get("call_id"), f"{field}.call_id"),
            )
        )
    elif kind == "message":
        role, text = item.get("role"), text_of(item.get("content"), f"{field}.content", _KINDS)
        if role in ("system", "developer"):
            messages.append(ClientMessage(role="system", text=text))
        elif role == "user":
            messages.append(ClientMessage(role="user", text=text))
        elif role == "assistant":
            messages.append(ClientMessage(role="assistant", text=text))
        else:
            raise Unusable(f"{field}.role: expected user, assistant, system or developer, got {role!r}", "input")
    else:
        raise Unusable(f"{field}.type: expected message, function_call or function_call_output, got {kind!r}", "input")
