"""OpenAI responses: ``POST /v1/responses``, the only dialect of Codex.

A client sends its whole history as items each turn, or the new items behind `previous_response_id`, or names items by
their ids: an id holds the place of the recorded turn, and its record has the rest. Items that the policy cannot use
(reasoning of another model, calls of tools that only OpenAI's servers run) are left out. A stream numbers its events
and has no ``[DONE]``.

``POST /v1/responses/compact`` lets the policy sum a history up. The item `compaction` of its answer holds the summary,
and stands for the history in later requests.
"""

import base64
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects import base
from headrace.gateway.dialects.base import Body, Unusable
from headrace.gateway.dialects.keys import RESPONSES, left_out
from headrace.gateway.dialects.response_tools import Tools, call_item, custom_arguments, tools_of
from headrace.gateway.dialects.response_writer import (
    ResponsesWriter,
    ended,
    message_item,
    named,
    thinking_item,
    usage_of,
)
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.product import ClientMessage, TurnPlace

_KINDS = ("input_text", "output_text", "text")
_SKIPPED = ("reasoning", "web_search_call", "image_generation_call", "additional_tools")
"""Items without a message: the model's own reasoning, results of the vendor's tools, and tools (`response_tools`)."""
_ID = re.compile(r"([a-z]+)_([0-9a-f]{20})_([0-9a-f]{12}(?:-[0-9a-f]{8})?)_([0-9]{1,6})((?:_[a-z0-9]+)?)")
"""The id of a response or of an item: kind, hash of the user, session, index of the turn, ending."""
_SUMMARY = "headrace1."
"""The beginning of a summary that a compaction item holds."""
_SUM_UP = """\
Write down everything that is needed to go on with this conversation from here: what was asked, what was done and \
found, what is left to do. Call no tool."""
_SUMMED_UP = "The conversation so far, summed up:\n"


class Responses:
    """The dialect of the Codex command line and of OpenAI's Agents SDK."""

    path = "/v1/responses"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        skipped = left_out(body, RESPONSES)
        text = body.get("text")
        if text is not None and not isinstance(text, dict):
            raise Unusable("text: expected an object", "text")
        given = body.get("input")
        items = [] if isinstance(given, str) else base.objects(given, "input")
        tools = tools_of(body, items)
        messages: list[ClientMessage] = []
        if instructions := base.string(body.get("instructions"), "instructions"):
            messages.append(ClientMessage(role="system", text=instructions))
        if isinstance(given, str):
            messages.append(ClientMessage(role="user", text=base.string(given, "input")))
        if items and items[-1].get("role") == "user":
            base.no_attachment(items[-1].get("content"), f"input[{len(items) - 1}]")
        recalled: dict[int, tuple[TurnPlace, frozenset[str]]] = {}
        for index, item in enumerate(items):
            if item.get("type") == "item_reference":
                _recall(messages, recalled, item.get("id"), f"input[{index}].id")
            else:
                _add(messages, item, f"input[{index}]", tools)
        previous = base.string(body.get("previous_response_id"), "previous_response_id")
        if not any(said.role != "system" for said in messages):
            raise Unusable("input: expected a text or at least one message", "input")
        return ModelRequest(
            model=base.string(body.get("model"), "model"),
            messages=tuple(messages),
            tools=tools.tools,
            origins=tools.origins,
            forced=base.forced(body, [tool.name for tool in tools.tools], tools.named),
            answer=base.answer_schema((text or {}).get("format"), "text.format"),
            logprobs="message.output_text.logprobs" in (body.get("include") or ()),
            previous=_place(previous, "previous_response_id")[0] if previous else None,
            recalled=recalled,
            parallel=base.flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
            max_tokens=base.whole_number(body.get("max_output_tokens"), "max_output_tokens"),
            temperature=base.temperature(body.get("temperature")),
            stream=base.flag(body.get("stream"), "stream"),
            user=base.end_user(body),
            left_out=(*skipped, *tools.vendors),
        )

    def reply(self, replies: Sequence[ModelReply], request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.reply`."""
        (reply,) = replies
        return ended(reply, _items(reply, request))

    def writer(self, request: ModelRequest, head: Head) -> Writer:
        """See `Dialect.writer`."""
        return ResponsesWriter(request, head)


class Compaction(Responses):
    """Sums a history up."""

    path = "/v1/responses/compact"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        asked = super().request({**body, "tools": None, "tool_choice": None, "text": None, "stream": False})
        return msgspec.structs.replace(asked, messages=(*asked.messages, ClientMessage(role="user", text=_SUM_UP)))

    def reply(self, replies: Sequence[ModelReply], request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.reply`."""
        (reply,) = replies
        summary = _SUMMARY + base64.b64encode(reply.said.encode()).decode()
        said = [message.text for message in request.messages[:-1] if message.role == "user"]
        output = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
            for text in said
            if not text.startswith(_SUMMED_UP)
        ]
        output.append({"type": "compaction", "id": f"cmp_{reply.id}", "encrypted_content": summary})
        return {
            "id": f"resp_{reply.id}",
            "object": "response.compaction",
            "created_at": reply.created,
            "output": output,
            "usage": usage_of(reply.usage),
        }


def _place(id: object, field: str) -> tuple[TurnPlace, str]:
    """The turn that an id of a response or item names, and the item as kind and ending. Unusable for another id."""
    match = _ID.fullmatch(id) if isinstance(id, str) else None
    if match is None:
        raise Unusable(f"{field}: expected an id that this gateway gave, got {id!r:.80}; send the items", field)
    kind, user, session, index, ending = match.groups()
    return TurnPlace(group=f"{user}.{session}", index=int(index)), kind + ending


def _recall(
    messages: list[ClientMessage], recalled: dict[int, tuple[TurnPlace, frozenset[str]]], id: object, field: str
) -> None:
    """Name an item of a recorded turn. Items of one turn are one message, sent or named."""
    place, item = _place(id, field)
    last = len(messages) - 1
    if last < 0 or messages[last].role != "assistant" or recalled.get(last, (place,))[0] != place:
        messages.append(ClientMessage(role="assistant"))
        last += 1
    recalled[last] = place, recalled.get(last, (place, frozenset()))[1] | {item}


def _items(reply: ModelReply, request: ModelRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.thinking:
        items.append(thinking_item(f"rs_{reply.id}", reply.thinking))
    if reply.text or not reply.calls:
        items.append(message_item(f"msg_{reply.id}", reply.text, base.logprobs_of(reply)))
    items += [call_item(call, *named(request, call, reply.id, index)) for index, call in enumerate(reply.calls)]
    if reply.after:
        items.append(message_item(f"msg_{reply.id}_after", reply.after))
    return items


def _add(messages: list[ClientMessage], item: dict[str, Any], field: str, tools: Tools) -> None:
    """Append an item to the history. Consecutive calls of a turn join the assistant's message that precedes them."""
    kind = item.get("type", "message")
    if kind in _SKIPPED:
        return
    if kind == "compaction":
        text = base.string(item.get("encrypted_content"), f"{field}.encrypted_content")
        try:
            summary = base64.b64decode(text.removeprefix(_SUMMARY), validate=True).decode()
        except ValueError:
            summary = ""
        if not text.startswith(_SUMMARY) or not summary:
            raise Unusable(f"{field}: another server compacted this history, and only it can read the result", "input")
        messages.append(ClientMessage(role="user", text=_SUMMED_UP + summary))
        return
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        given = custom_arguments(item, field) if custom else base.arguments(item.get("arguments"), f"{field}.arguments")
        call = tools.call(item, field, given)
        if messages and messages[-1].role == "assistant":
            messages[-1] = msgspec.structs.replace(messages[-1], calls=(*messages[-1].calls, call))
        else:
            messages.append(ClientMessage(role="assistant", calls=(call,)))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append(
            ClientMessage(
                role="tool",
                text=base.text_of(item.get("output"), f"{field}.output", _KINDS),
                call_id=base.string(item.get("call_id"), f"{field}.call_id"),
            )
        )
    elif kind == "message":
        role, text = item.get("role"), base.text_of(item.get("content"), f"{field}.content", _KINDS)
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
