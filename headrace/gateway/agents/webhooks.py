"""Webhooks: the end of a run is posted to the user's address, signed with the user's secret."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from headrace.gateway.agents.requests import AgentRefused, Webhook, host_of
from headrace.messages.product import Agent, AgentRun

SIGNATURE = "X-Headrace-Signature"
"""``sha256=`` and the HMAC of the body in hexadecimal digits."""
WAITS_S = (0.0, 1.0, 5.0, 25.0, 125.0)
"""Seconds before each try."""
TIMEOUT_S = 10.0


def allowed(webhook: Webhook | None, hosts: Sequence[str]) -> None:
    """AgentRefused for a host that the operator did not name: the gateway can reach the operator's private network."""
    if webhook is not None and host_of(webhook.url) not in hosts:
        named = ", ".join(hosts) or "none"
        raise AgentRefused(
            400, "invalid_webhook", f"webhook.url: expected a host of [production] webhook_hosts: {named}"
        )


class Webhooks:
    """Posts the ends of runs, and repeats a post after an error."""

    def __init__(
        self, event: Callable[..., Awaitable[None]], hosts: Sequence[str], waits_s: Sequence[float] = WAITS_S
    ) -> None:
        """hosts: `[production] webhook_hosts`. They are compared again before a post: the agent is a stored record, and
        the operator may have removed its host."""
        self._event, self._hosts, self._waits_s = event, hosts, waits_s

    async def post(self, agent: Agent, run: AgentRun) -> None:
        """Post the end of a run to its agent's address; publish an event if every try fails."""
        if not agent.webhook.startswith(("https://", "http://")) or host_of(agent.webhook) not in self._hosts:
            text = f"agent {agent.id}, run {run.id}: the host is none of [production] webhook_hosts"
            await self._event("webhook_failed", text, "warning")
            return
        body = json.dumps({"event": "statusChange", "agent": agent.id, "run": run.id, "status": run.state}).encode()
        signed = hmac.new(agent.webhook_secret.encode(), body, hashlib.sha256).hexdigest()
        headers = {"Content-Type": "application/json", SIGNATURE: f"sha256={signed}"}
        why = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
            for wait in self._waits_s:
                await asyncio.sleep(wait)
                try:
                    async with http.post(agent.webhook, data=body, headers=headers, allow_redirects=False) as answer:
                        if answer.status < 300:
                            return
                        why = f"status {answer.status}"
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    why = f"{type(error).__name__}: {error}"
        await self._event("webhook_failed", f"agent {agent.id}, run {run.id}: {why}", "warning")
