"""Reads the server-sent events of a streamed turn back into the answer, in every dialect."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """One turn, the same for every dialect."""

    thinking: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments."""
    finish: str
    usage: tuple[int, int, int]
    """Prompt, cached, sampled."""


def events(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of every event; comments and the end of a chat stream are left out."""
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line.startswith("data: ")]
        if lines and lines[0] != "data: [DONE]":
            yield json.loads(lines[0].removeprefix("data: "))


def whole(path: str, body: dict[str, Any]) -> Answer:
    """An answer that was not streamed."""
    if path == "/v1/chat/completions":
        message, usage = body["choices"][0]["message"], body["usage"]
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        return Answer(
            message.get("reasoning_content", ""),
            message["content"] or "",
            tuple(calls),
            body["choices"][0]["finish_reason"],
            (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]),
        )
    if path == "/v1/messages":
        return _message(body["content"], body["stop_reason"], body["usage"])
    texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    thinking = [part["text"] for item in body["output"] if item["type"] == "reasoning" for part in item["content"]]
    calls = [
        (item["call_id"], item["name"], item["arguments"] if item["type"] == "function_call" else item["input"])
        for item in body["output"]
        if item["type"] in ("function_call", "custom_tool_call") and item["status"] == "completed"
    ]
    usage = body["usage"]
    counts = (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])
    return Answer("".join(thinking), "\n".join(filter(None, texts)), tuple(calls), body["status"], counts)


def streamed(path: str, data: bytes) -> Answer:
    """A streamed answer: its deltas alone, joined as a client joins them."""
    return {"/v1/chat/completions": _chat, "/v1/messages": _messages, "/v1/responses": _responses}[path](data)


def _chat(data: bytes) -> Answer:
    assert data.endswith(b"data: [DONE]\n\n")
    thinking, text, finish, usage = "", "", "", None
    calls: list[list[str]] = []
    for chunk in events(data):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            thinking += delta.get("reasoning_content", "")
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append([call["id"], call["function"]["name"], ""])
                calls[call["index"]][2] += call["function"]["arguments"]
    assert usage is not None
    counts = (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
    return Answer(thinking, text, tuple((id, name, arguments) for id, name, arguments in calls), finish, counts)


def _messages(data: bytes) -> Answer:
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    open_block = False
    for event in events(data):
        match event["type"]:
            case "content_block_start":
                assert not open_block and event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"json": ""})
                open_block = True
            case "content_block_delta":
                assert open_block and event["index"] == len(blocks) - 1
                delta = event["delta"]
                key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
                blocks[-1][key] += delta["partial_json" if key == "json" else key]
            case "content_block_stop":
                open_block = False
            case "message_delta":
                end = event
    assert not open_block
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return _message(blocks, end["delta"]["stop_reason"], end["usage"])


def _message(blocks: list[dict[str, Any]], stop: str, usage: dict[str, int]) -> Answer:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thinking = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [
        (block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    cached = usage["cache_read_input_tokens"]
    counts = (usage["input_tokens"] + cached, cached, usage["output_tokens"])
    return Answer("".join(thinking), "\n".join(texts), tuple(calls), stop, counts)


def _responses(data: bytes) -> Answer:
    items: list[dict[str, Any]] = []
    body: dict[str, Any] = {}
    for number, event in enumerate(events(data)):
        kind = event["type"]
        assert event["sequence_number"] == number
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"id": event["item"]["id"], "text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"] and event["output_index"] == len(items) - 1
            items[-1]["text"] += event["delta"]
        elif kind == "response.output_item.done":
            item = event["item"]
            given = item.get("arguments", item.get("input"))
            assert items[-1]["text"] == (item["content"][0]["text"] if given is None else given)
            items[-1] = item
        elif kind in ("response.completed", "response.incomplete"):
            body = event["response"]
    assert body["output"] == items
    return whole("/v1/responses", body)
