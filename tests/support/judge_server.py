"""A model that judges, over real HTTP: it speaks the OpenAI chat API, knows the truth, and errs by plan."""

import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Noise:
    """How a criterion is judged. Shares are drawn anew for every work and seed, and for both orders alike."""

    wrong: float = 0.0
    """Answers that are wrong."""
    first: float = 0.0
    """Answers that take the word that is offered first."""
    longer: float = 0.0
    """Answers that find long works (over `LONG` characters) to meet the statement."""


LONG = 400
SHOWN = r"<(work-\w+)>\n(.*)\n</\1>\n\n## Statement\n(.*?)\n\n## Verdict\nOne of: (\w+)"


def drawn(*parts: object) -> float:
    """A number from 0 to 1 that follows from the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6]) / 2**48


@dataclass
class JudgeServer:
    """The server's state. truth: works that meet every statement."""

    truth: set[str]
    noise: Mapping[str, Noise]
    """By statement."""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    failures: list[web.Response | str] = field(default_factory=list)
    """Given before any answer, one per request: a response, or a text in place of the model's JSON."""
    authorization: str = ""
    """Header of the newest request."""
    broken: bool = False
    """Every request gets status 503."""

    async def answer(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions."""
        body = await request.json()
        self.requests.append(body)
        self.authorization = request.headers.get("Authorization", "")
        if self.broken:
            return web.Response(status=503, text="overloaded")
        reply = json.dumps({"reason": "because", "verdict": self._verdict(body)})
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, web.Response):
                return failure
            reply = failure
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        message = {"role": "assistant", "content": reply}
        return web.json_response({"object": "chat.completion", "choices": [{"message": message}], "usage": usage})

    def _verdict(self, body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        shown = re.search(SHOWN, text, re.DOTALL)
        assert shown is not None, text
        work, statement, offered = shown.group(2), shown.group(3), shown.group(4)
        noise, key = self.noise[statement], (work, statement, body["seed"])
        if drawn("first", *key) < noise.first:
            return offered
        if len(work) > LONG and drawn("longer", *key) < noise.longer:
            return "met"
        right = any(each in work for each in self.truth)
        return "met" if right != (drawn("wrong", *key) < noise.wrong) else "not_met"


@asynccontextmanager
async def judge_server(truth: set[str], noise: Mapping[str, Noise]) -> AsyncIterator[JudgeServer]:
    """The server on a free port of loopback."""
    server = JudgeServer(truth, noise)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
