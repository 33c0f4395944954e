"""The output items of the responses dialect, whole and streamed. Events are numbered, and nothing follows the last one.

An item is added, filled by deltas, and done. A custom tool's argument is a text: its deltas are parts of the text, not
of the JSON in which the policy writes it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.gateway.conversation import ModelReply, ModelRequest, Origin
from headrace.gateway.dialects import base
from headrace.gateway.dialects.base import event
from headrace.gateway.dialects.response_tools import INPUT, call_item
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.product import ClientCall, ClientUsage

_FAILED = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def head_of(reply: ModelReply | Head, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """A response."""
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


def ended(reply: ModelReply, output: list[dict[str, Any]]) -> dict[str, Any]:
    """A response that has ended."""
    incomplete = {"reason": "max_output_tokens"} if reply.stop == "length" else None
    status = "incomplete" if incomplete else "completed"
    return head_of(reply, status, output) | {"incomplete_details": incomplete, "usage": usage_of(reply.usage)}


def usage_of(usage: ClientUsage) -> dict[str, Any]:
    """The tokens of a response."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.sampled,
    }


def message_item(id: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The item of a text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
    return {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def thinking_item(id: str, text: str) -> dict[str, Any]:
    """The item of the thinking."""
    return {"id": id, "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def named(request: ModelRequest, call: ClientCall, id: str, index: int) -> tuple[Origin, str]:
    """How the client names the tool of a call, and the id of the call's item. id: of the reply."""
    origin = request.origins.get(call.name, Origin(call.name))
    return origin, f"{'ctc' if origin.custom else 'fc'}_{id}_{index}"


class ResponsesWriter(Writer):
    """The events of a streamed response."""

    def __init__(self, request: ModelRequest, head: Head) -> None:
        super().__init__(request, head)
        self._count = itertools.count()
        self._output: list[dict[str, Any]] = []
        """The items that are done."""
        self._open, self._id, self._filled = "", "", ""
        """The kind, the id and the content so far of the item that is not."""
        self._call = ClientCall(id="", name="", arguments="")

    def _say(self, kind: str, /, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._count)} | data, kind)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._output)}

    def begin(self, usage: ClientUsage) -> Iterator[bytes]:
        """See `Writer.begin`."""
        started = head_of(self.head, "in_progress", [])
        yield self._say("response.created", response=started)
        yield self._say("response.in_progress", response=started)

    def think(self, piece: str) -> Iterator[bytes]:
        """See `Writer.think`."""
        if self._open != "reasoning":
            again = any(item["type"] == "reasoning" for item in self._output)
            yield from self._add("reasoning", f"rs_{self.head.id}{'_after' if again else ''}")
        yield from self._fill(piece)

    def say(self, piece: str) -> Iterator[bytes]:
        """See `Writer.say`."""
        if self._open != "message":
            yield from self._add("message", f"msg_{self.head.id}")
        yield from self._fill(piece)

    def add(self, piece: str) -> Iterator[bytes]:
        """See `Writer.add`."""
        yield from self._add("message", f"msg_{self.head.id}_after")
        yield from self._fill(piece)

    def call(self, index: int, begun: ClientCall) -> Iterator[bytes]:
        """See `Writer.call`."""
        origin, id = named(self.request, begun, self.head.id, index)
        yield from self._add("custom" if origin.custom else "function", id, begun)
        yield from self.argue(index, begun.arguments)

    def argue(self, index: int, piece: str) -> Iterator[bytes]:
        """See `Writer.argue`."""
        arguments = self._call.arguments + piece
        self._call = ClientCall(id=self._call.id, name=self._call.name, arguments=arguments)
        if self._open == "function":
            yield from self._fill(piece)
        elif (text := _input_of(arguments)).startswith(self._filled):
            yield from self._fill(text[len(self._filled) :])

    def _add(self, kind: str, id: str, call: ClientCall | None = None) -> Iterator[bytes]:
        """The start of an item, behind the end of the open one."""
        yield from self._done()
        self._open, self._id, self._filled = kind, id, ""
        if call is not None:
            self._call = ClientCall(id=call.id, name=call.name, arguments="")
        item = self._item("in_progress")
        if kind in ("message", "reasoning"):
            item["content"] = []
        yield self._say("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._say("response.content_part.added", **self._place(), content_index=0, part=part)

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is now."""
        if self._open == "message":
            return message_item(self._id, self._filled) | {"status": status}
        if self._open == "reasoning":
            return thinking_item(self._id, self._filled)
        origin = self.request.origins.get(self._call.name, Origin(self._call.name))
        key = "input" if origin.custom else "arguments"
        call = ClientCall(id=self._call.id, name=self._call.name, arguments="{}")
        return call_item(call, origin, self._id) | {"status": status, key: self._filled}

    def _fill(self, piece: str) -> Iterator[bytes]:
        if not piece:
            return
        self._filled += piece
        place = self._place()
        if self._open == "message":
            yield self._say("response.output_text.delta", **place, content_index=0, delta=piece, logprobs=[])
        elif self._open == "reasoning":
            yield self._say("response.reasoning_text.delta", **place, content_index=0, delta=piece)
        else:
            kind = "custom_tool_call_input" if self._open == "custom" else "function_call_arguments"
            yield self._say(f"response.{kind}.delta", **place, delta=piece)

    def _done(self) -> Iterator[bytes]:
        """The end of the open item."""
        if not self._open:
            return
        cut = self.cut and self._open in ("function", "custom")
        place, text, item = self._place(), self._filled, self._item("incomplete" if cut else "completed")
        if self._open == "message":
            yield self._say("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
            part = {"type": "output_text", "text": text, "annotations": []}
            yield self._say("response.content_part.done", **place, content_index=0, part=part)
        elif self._open == "reasoning":
            yield self._say("response.reasoning_text.done", **place, content_index=0, text=text)
        elif self._open == "custom":
            yield self._say("response.custom_tool_call_input.done", **place, input=text)
        else:
            yield self._say("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        yield self._say("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = ""

    def finish(self, reply: ModelReply) -> Iterator[bytes]:
        """See `Writer.finish`."""
        yield from self._done()
        if not any(item["type"] != "reasoning" for item in self._output):
            yield from self._add("message", f"msg_{self.head.id}")
            yield from self._done()
        for item in self._output:
            if item["type"] == "message" and not item["id"].endswith("_after"):
                item["content"][0]["logprobs"] = base.logprobs_of(reply)
        name = "response.incomplete" if reply.stop == "length" else "response.completed"
        yield self._say(name, response=ended(reply, self._output))

    def fail(self, status: int, text: str) -> Iterator[bytes]:
        """See `Writer.fail`."""
        error = {"code": _FAILED.get(status, "server_error"), "message": text}
        yield self._say("response.failed", response=head_of(self.head, "failed", self._output) | {"error": error})


def _input_of(arguments: str) -> str:
    """The text in the arguments of a custom call, which may end in the middle of it."""
    for end in ("", '"}'):
        try:
            given = json.loads(arguments + end).get(INPUT, "")
        except ValueError:
            continue
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ""
