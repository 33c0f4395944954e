"""Anthropic messages: ``POST /v1/messages`` and ``/v1/messages/count_tokens``, the dialect of Claude Code.

A client sends tool results as blocks of a user's message; in a `ModelRequest` each result is a message of its own,
before the user's text. Thinking blocks are left out. A stream consists of ``message_start``; start, delta and stop of
each block; ``message_delta`` with the stop reason; and ``message_stop``.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects import base
from headrace.gateway.dialects.base import Body, Unusable, event
from headrace.gateway.dialects.keys import MESSAGES, left_out
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.product import ClientCall, ClientMessage, ClientTool, ClientUsage

_STOP = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class Messages:
    """The dialect of Claude Code and of Anthropic's SDK."""

    path = "/v1/messages"

    def request(self, body: Body) -> ModelRequest:
        """See `Dialect.request`."""
        skipped = left_out(body, MESSAGES)
        config = body.get("output_config")
        if config is not None and not isinstance(config, dict):
            raise Unusable("output_config: expected an object", "output_config")
        form = (config or {}).get("format") or body.get("output_format")
        entries = base.objects(body.get("messages"), "messages")
        if entries:
            base.no_attachment(entries[-1].get("content"), f"messages[{len(entries) - 1}]")
        messages: list[ClientMessage] = []
        if system := base.text_of(body.get("system"), "system"):
            messages.append(ClientMessage(role="system", text=system))
        for index, entry in enumerate(entries):
            messages += _message(entry, f"messages[{index}]")
        if not any(said.role != "system" for said in messages):
            raise Unusable("messages: expected at least one message", "messages")
        metadata, choice = body.get("metadata"), body.get("tool_choice")
        user = base.string(metadata.get("user_id") if isinstance(metadata, dict) else None, "metadata.user_id")
        alone = choice.get("disable_parallel_tool_use") if isinstance(choice, dict) else None
        tools, vendors = _tools(body)
        return ModelRequest(
            model=base.string(body.get("model"), "model"),
            messages=tuple(messages),
            tools=tools,
            forced=base.forced(body, [tool.name for tool in tools]),
            stops=base.stops(body.get("stop_sequences"), "stop_sequences"),
            answer=base.answer_schema(form, "output_config.format"),
            parallel=not base.flag(alone, "tool_choice.disable_parallel_tool_use"),
            max_tokens=base.whole_number(body.get("max_tokens"), "max_tokens"),
            temperature=base.temperature(body.get("temperature")),
            stream=base.flag(body.get("stream"), "stream"),
            user=_person(user),
            left_out=(*skipped, *vendors),
        )

    def reply(self, replies: Sequence[ModelReply], request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.reply`."""
        (reply,) = replies
        usage = _prompt_usage(reply.usage) | {"output_tokens": reply.usage.sampled}
        return _head(reply) | {"content": _blocks(reply), **_end(reply), "usage": usage}

    def writer(self, request: ModelRequest, head: Head) -> Writer:
        """See `Dialect.writer`."""
        return _Writer(request, head)


def anthropic_error(status: int, text: str) -> dict[str, Any]:
    """An error as Anthropic's clients expect it."""
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": text}}


class _Writer(Writer):
    """Blocks, one after the other: start, deltas, stop. A ping follows the message's start."""

    _index, _open = -1, ""

    def _say(self, name: str, **data: Any) -> bytes:
        return event({"type": name} | data, name)

    def begin(self, usage: ClientUsage) -> Iterator[bytes]:
        """See `Writer.begin`."""
        message = _head(self.head) | {"usage": _prompt_usage(usage) | {"output_tokens": 0}}
        yield self._say("message_start", message=message)
        yield self._say("ping")

    def _block(self, kind: str, block: dict[str, Any] | None = None) -> Iterator[bytes]:
        """The start of a block of this kind, behind the stop of the open one."""
        yield from self._stop()
        self._open, self._index = kind, self._index + 1
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        start = {"type": kind} | (block if block is not None else empty[kind])
        yield self._say("content_block_start", index=self._index, content_block=start)

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield self._say("content_block_stop", index=self._index)

    def _delta(self, kind: str, piece: str) -> Iterator[bytes]:
        names = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
        yield self._say("content_block_delta", index=self._index, delta={"type": kind, names[kind]: piece})

    def think(self, piece: str) -> Iterator[bytes]:
        """See `Writer.think`."""
        if self._open != "thinking":
            yield from self._block("thinking")
        yield from self._delta("thinking_delta", piece)

    def say(self, piece: str) -> Iterator[bytes]:
        """See `Writer.say`."""
        if self._open != "text":
            yield from self._block("text")
        yield from self._delta("text_delta", piece)

    def call(self, index: int, begun: ClientCall) -> Iterator[bytes]:
        """See `Writer.call`."""
        yield from self._block("tool_use", {"id": begun.id, "name": begun.name, "input": {}})
        yield from self._delta("input_json_delta", begun.arguments)

    def argue(self, index: int, piece: str) -> Iterator[bytes]:
        """See `Writer.argue`."""
        return self._delta("input_json_delta", piece)

    def add(self, piece: str) -> Iterator[bytes]:
        """See `Writer.add`."""
        yield from self._block("text")
        yield from self._delta("text_delta", piece)

    def finish(self, reply: ModelReply) -> Iterator[bytes]:
        """See `Writer.finish`."""
        yield from self._stop()
        yield self._say(
            "message_delta",
            delta=_end(reply),
            usage=_prompt_usage(reply.usage) | {"output_tokens": reply.usage.sampled},
        )
        yield self._say("message_stop")

    def fail(self, status: int, text: str) -> Iterator[bytes]:
        """See `Writer.fail`."""
        yield event(anthropic_error(status, text), "error")


def _head(reply: ModelReply | Head) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(reply: ModelReply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stopped_by else _STOP[reply.stop]
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by or None}


def _prompt_usage(usage: ClientUsage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
    }


def _blocks(reply: ModelReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    if reply.after:
        blocks.append({"type": "text", "text": reply.after})
    return blocks


def _tools(body: Body) -> tuple[tuple[ClientTool, ...], tuple[str, ...]]:
    """The tools that the client runs, and the names of those that only the vendor's servers run."""
    entries = [(entry, entry.get("type"), f"tools[{index}]") for index, entry in enumerate(base.offered(body))]
    tools = (base.tool_of(entry, "input_schema", place) for entry, kind, place in entries if kind in (None, "custom"))
    return tuple(tools), tuple(f"tools.{kind}" for _, kind, _ in entries if kind not in (None, "custom"))


def _person(user: str) -> str:
    """The person in a `user_id`. Claude Code puts device, account and session into it: as JSON, and before 2.1 as
    ``user_DEVICE_account_ACCOUNT_session_SESSION``. A session is nobody."""
    try:
        parts = json.loads(user)
    except ValueError:
        return user.partition("_session_")[0]
    if not isinstance(parts, dict) or "session_id" not in parts:
        return user
    return str(parts.get("account_uuid") or parts.get("device_id") or "")


def _message(entry: dict[str, Any], field: str) -> list[ClientMessage]:
    role, content = entry.get("role"), entry.get("content")
    if role == "system":  # Claude Code's, since 2.1.154: what changed in the middle of a conversation
        return [ClientMessage(role="system", text=base.text_of(content, f"{field}.content"))]
    if role not in ("user", "assistant"):
        raise Unusable(f"{field}.role: expected user, assistant or system, got {role!r}", "messages")
    blocks = (
        [{"type": "text", "text": content}] if isinstance(content, str) else base.objects(content, f"{field}.content")
    )
    texts: list[str] = []
    calls: list[ClientCall] = []
    results: list[ClientMessage] = []
    for number, block in enumerate(blocks):
        kind, place = block.get("type"), f"{field}.content[{number}]"
        if kind == "text":
            texts.append(base.text_of([block], place))
        elif role == "user" and isinstance(kind, str) and kind in base.ATTACHMENTS:
            texts.append(base.placeholder(kind))
        elif kind in ("thinking", "redacted_thinking"):
            continue
        elif kind == "tool_use" and role == "assistant":
            given = block.get("input")
            if not isinstance(given, dict):
                raise Unusable(f"{place}.input: expected an object", "messages")
            calls.append(
                ClientCall(
                    id=base.string(block.get("id"), f"{place}.id"),
                    name=base.string(block.get("name"), f"{place}.name"),
                    arguments=base.plain(json.dumps(given, ensure_ascii=False), f"{place}.input"),
                )
            )
        elif kind == "tool_result" and role == "user":
            results.append(
                ClientMessage(
                    role="tool",
                    text=base.text_of(block.get("content"), f"{place}.content"),
                    call_id=base.string(block.get("tool_use_id"), f"{place}.tool_use_id"),
                )
            )
        else:
            raise Unusable(f"{place}.type: expected text, tool_use or tool_result, got {kind!r}", "messages")
    text = "\n".join(texts)
    if role == "assistant":
        return [ClientMessage(role="assistant", text=text, calls=tuple(calls))]
    return [*results, *([ClientMessage(role="user", text=text)] if text or not results else [])]
