"""OpenAI responses: ``POST /v1/responses``, the only dialect of Codex.

The dialect is stateless: the client sends its whole history as items each turn. Items that the policy cannot use
(reasoning of another model, calls of tools that only OpenAI's servers run) are left out. A stream numbers its events
and has no ``[DONE]``.
"""

from typing import Any

import msgspec

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects.base import (
    Body,
    Unusable,
    arguments,
    end_user,
    flag,
    no_attachment,
    objects,
    string,
    temperature,
    text_of,
    whole_number,
)
from headrace.gateway.dialects.keys import RESPONSES, left_out, no_format
from headrace.gateway.dialects.response_tools import Tools, call_item, custom_arguments, tools_of
from headrace.gateway.dialects.response_writer import ResponsesWriter, ended, message_item, named, thinking_item
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.product import ClientMessage

_KINDS = ("input_text", "output_text", "text")
_SKIPPED = ("reasoning", "web_search_call", "image_generation_call", "additional_tools")
"""Items without a message: the model's own reasoning, results of the vendor's tools, and tools (`response_tools`)."""
_ELSEWHERE = {
    "item_reference": "nothing is stored under an id; send the item itself (in the AI SDK: store = false)",
    "compaction": "another server compacted this history, and only it can read the result; send the history itself",
}


class Responses:
    """The dialect of the Codex command line and of OpenAI's Agents SDK."""

    path = "/v1/responses"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        skipped = left_out(body, RESPONSES)
        no_format(body.get("text"), "text")
        given = body.get("input")
        items = [] if isinstance(given, str) else objects(given, "input")
        tools = tools_of(body, items)
        messages: list[ClientMessage] = []
        if instructions := string(body.get("instructions"), "instructions"):
            messages.append(ClientMessage(role="system", text=instructions))
        if isinstance(given, str):
            messages.append(ClientMessage(role="user", text=string(given, "input")))
        if items and items[-1].get("role") == "user":
            no_attachment(items[-1].get("content"), f"input[{len(items) - 1}]")
        for index, item in enumerate(items):
            _add(messages, item, f"input[{index}]", tools)
        if not any(said.role != "system" for said in messages):
            raise Unusable("input: expected a text or at least one message", "input")
        return ModelRequest(
            model=string(body.get("model"), "model"),
            messages=tuple(messages),
            tools=tools.tools,
            origins=tools.origins,
            parallel=flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
            max_tokens=whole_number(body.get("max_output_tokens"), "max_output_tokens"),
            temperature=temperature(body.get("temperature")),
            stream=flag(body.get("stream"), "stream"),
            user=end_user(body),
            left_out=(*skipped, *tools.vendors),
        )

    def reply(self, reply: ModelReply, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.reply`."""
        return ended(reply, _items(reply, request))

    def writer(self, request: ModelRequest, head: Head) -> Writer:
        """See `Dialect.writer`."""
        return ResponsesWriter(request, head)

    def error(self, status: int, text: str, field: str = "") -> dict[str, Any]:
        """See `Dialect.error`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": text, "type": kind, "param": field or None, "code": _CODES.get(status)}}


_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def _items(reply: ModelReply, request: ModelRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.thinking:
        items.append(thinking_item(f"rs_{reply.id}", reply.thinking))
    if reply.text or not reply.calls:
        items.append(message_item(f"msg_{reply.id}", reply.text))
    items += [call_item(call, *named(request, call, reply.id, index)) for index, call in enumerate(reply.calls)]
    if reply.after:
        items.append(message_item(f"msg_{reply.id}_after", reply.after))
    return items


def _add(messages: list[ClientMessage], item: dict[str, Any], field: str, tools: Tools) -> None:
    """Append an item to the history. Consecutive calls of a turn join the assistant's message that precedes them."""
    kind = item.get("type", "message")
    if kind in _SKIPPED:
        return
    if kind in _ELSEWHERE:
        raise Unusable(f"{field}: {_ELSEWHERE[kind]}", "input")
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        given = custom_arguments(item, field) if custom else arguments(item.get("arguments"), f"{field}.arguments")
        call = tools.call(item, field, given)
        if messages and messages[-1].role == "assistant":
            messages[-1] = msgspec.structs.replace(messages[-1], calls=(*messages[-1].calls, call))
        else:
            messages.append(ClientMessage(role="assistant", calls=(call,)))
    elif kind in ("function_call_output", "custom_tool_call_output"):
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
        elif role == "assistant" and messages and messages[-1].role == "assistant" and messages[-1].calls:
            said = "\n".join(filter(None, (messages[-1].text, text)))  # what a turn says behind its calls
            messages[-1] = msgspec.structs.replace(messages[-1], text=said)
        elif role == "assistant":
            messages.append(ClientMessage(role="assistant", text=text))
        else:
            raise Unusable(f"{field}.role: expected user, assistant, system or developer, got {role!r}", "input")
    else:
        raise Unusable(f"{field}.type: expected a message, a call or its output, got {kind!r}", "input")
