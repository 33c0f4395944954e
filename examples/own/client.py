"""Your own client: a small agent with a tool of its own, over plain HTTP. It needs nothing of headrace.

    OWN_KEY=... python examples/own/client.py URL TURNS

It asks the gateway for turns in OpenAI's dialect, runs the calls itself, and rates the session at the end. The key was
printed by `headrace keys --add`.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "opening_hours",
        "description": "the opening hours of a city library",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def post(url: str, key: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """An answer, and the session that it belongs to. SystemExit with the server's sentence."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read() or b"{}"), answer.headers.get("X-Headrace-Session", "")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answers {error.code}: {error.read().decode(errors='replace')}") from None


def talk(url: str, key: str, turns: int) -> dict[str, Any]:
    """Some turns of one session, then a thumb."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "When does the library of Bern open?"}]
    session, calls, tokens = "", 0, 0
    for _ in range(turns):
        body = {"model": "latest", "messages": messages, "tools": [TOOL], "max_tokens": 16}
        answer, session = post(f"{url}/v1/chat/completions", key, body)
        reply = answer["choices"][0]["message"]
        tokens += answer["usage"]["completion_tokens"]
        messages.append(reply)
        for call in reply.get("tool_calls") or []:
            calls += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "from 8:30 to 19:00"})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": "Go on."})
    post(f"{url}/v1/sessions/{session}/feedback", key, {"thumb": "up"})
    return {"session": session, "turns": turns, "calls": calls, "tokens": tokens}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(talk(sys.argv[1], os.environ["OWN_KEY"], int(sys.argv[2]))) + "\n")
