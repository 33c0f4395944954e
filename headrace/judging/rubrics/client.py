"""A client for any endpoint that speaks the OpenAI chat API: one request, structured output, retries, tokens counted.

It uses aiohttp, which the package needs anyway, instead of the openai package. A judge sends one kind of request. Its
retries end as an infrastructure failure and never as an answer. Servers with incomplete copies of the API fail the type
checks of a strict client.
"""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from headrace.backoff import Backoff
from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.secret_files import SecretError, token

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which a request is repeated."""
SHOWN = 300
"""Characters of a reply that an error shows."""


class EndpointFailed(HeadraceError):
    """The endpoint gave no usable answer in time, which is an infrastructure failure. The text has its last answer."""


class EndpointRefused(HeadraceError, exit_status=WRONG_INPUT):
    """The endpoint refuses the request, the model or the key: the configuration is wrong."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    reply: dict[str, Any]
    """The JSON object that the model wrote."""
    prompt_tokens: int
    completion_tokens: int


class Endpoint:
    """One model at one endpoint."""

    def __init__(self, url: str, model: str, *, key_file: str = "", within_s: float = 120.0, parallel: int = 8) -> None:
        """url: with its version, such as ``http://host/v1``. key_file: the file with the API key.
        within_s: per answer, retries included. EndpointRefused when the file does not hold a key."""
        try:
            key = token(key_file, "[judge] model_key_file") if key_file else ""
        except SecretError as error:
            raise EndpointRefused(str(error)) from None
        self.url, self.model, self._within_s = f"{url.rstrip('/')}/chat/completions", model, within_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._slots = asyncio.Semaphore(parallel)
        self._session: aiohttp.ClientSession | None = None
        self._declared = ""
        """The model that the endpoint's first answer named."""

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, messages: list[dict[str, str]], schema: dict[str, Any], *, seed: int, temperature: float
    ) -> Completion:
        """The model's answer as a JSON object with the schema's keys. EndpointFailed, EndpointRefused."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "seed": seed,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            },
        }
        last = "no answer"
        backoff = Backoff(0.2, 20.0, jitter=0.3)
        async with self._slots:
            try:
                async with asyncio.timeout(self._within_s):
                    while True:
                        try:
                            return await self._once(body, schema)
                        except _Again as error:
                            last, after_s = str(error), error.after_s
                        await asyncio.sleep(max(after_s, backoff.next()))
                        # Another seed bypasses caches, which could return the broken answer again.
                        body["seed"] += 1_000_003
            except TimeoutError:
                raise EndpointFailed(f"{self.url} gave no usable answer within {self._within_s:g} s: {last}") from None

    async def _once(self, body: dict[str, Any], schema: dict[str, Any]) -> Completion:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(self.url, json=body) as response:
                text = await response.text(errors="replace")
                status, after = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if status in RETRIED:
            raise _Again(f"status {status}: {text[:SHOWN]}", after)
        if status != 200:
            raise EndpointRefused(f"{self.url} refuses model {self.model!r} with status {status}: {text[:SHOWN]}")
        try:
            answer = json.loads(text)
            content = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            declared = str(answer.get("model") or "")
            reply = json.loads(_object(content))
            for key in schema["required"]:
                allowed = schema["properties"][key].get("enum")
                if allowed is not None and reply[key] not in allowed:
                    raise ValueError(f"{key}: expected one of {', '.join(allowed)}")
            completion = Completion(
                reply=reply,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Again(f"an answer that cannot be read ({error}): {text[:SHOWN]}") from None
        self._declared = self._declared or declared
        if declared and declared != self._declared:
            raise EndpointRefused(
                f"{self.url} answered as model {declared[:SHOWN]!r} after {self._declared[:SHOWN]!r}: a run has one "
                "judge; name a version of the model that does not change"
            )
        return completion


class _Again(Exception):
    """A failure that may pass. after_s: the delay that the endpoint asks for, at most a minute."""

    def __init__(self, text: str, after: str = "") -> None:
        super().__init__(text)
        self.after_s = min(60.0, float(after)) if after.isdecimal() else 0.0


def _object(content: str) -> str:
    """The JSON object in a text that may have a fence or words around it."""
    return content[content.index("{") : content.rindex("}") + 1]
