"""Simulated users: real HTTP requests to the gateway, at a rate that follows day and night.

The rate follows a raised cosine over `day_s` (zero at night), arrivals are Poisson, and a user judges the files that
came back: thumb up when every file has the solution's content. The seed makes a run's users repeat the same requests.
"""

import asyncio
import json
import math
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.launch.product.gateway_key import place
from headrace.messages.tasks import Oracle

if TYPE_CHECKING:
    import aiohttp

DAY_S = 40.0
"""Seconds of a day of the simulated users, who send nothing in its night."""
PATIENCE_S = 60.0
"""Seconds that a user waits for a gateway that does not answer."""


def rate(moment_s: float, day_s: float, peak: float) -> float:
    """Requests per second at a moment of the day; zero around midnight, `peak` at noon."""
    return peak * max(0.0, -math.cos(2 * math.pi * moment_s / day_s))


def satisfied(files: dict[str, str], oracle: Oracle) -> bool:
    """Whether the answer has the solution's content in every file that the solution changes."""
    return all(files.get(path, "").encode() == content for path, content in oracle.solution.items())


async def simulate(config: Config, run_dir: Path, stopping: asyncio.Event) -> None:
    """Send requests until `stopping` is set."""
    import aiohttp

    from headrace.tasks import open_suite

    suite = open_suite(config.tasks.heldout, config.tasks.dir)
    ids = suite.ids()
    rng = random.Random(config.run.seed)
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        product = Product(http, run_dir, stopping)
        await product.opened()
        begin = time.monotonic()
        while not stopping.is_set():
            now = rate(time.monotonic() - begin, DAY_S, config.production.simulated_requests_per_s)
            # Thinning: candidates arrive at the peak rate and are accepted in proportion to the current rate.
            pause = rng.expovariate(config.production.simulated_requests_per_s)
            try:
                async with asyncio.timeout(pause):
                    await stopping.wait()
                break
            except TimeoutError:
                pass
            if rng.random() * config.production.simulated_requests_per_s < now:
                task = ids[-1 - rng.randrange(min(len(ids), 100))]
                group.create_task(session(product, suite.name, task, f"user{rng.randrange(20)}", suite.oracle(task)))


async def session(product: "Product", suite: str, task: str, user: str, oracle: Oracle) -> None:
    """One user: send a request, wait for the result, give feedback."""
    try:
        asked = await product.call("POST", "/v1/sessions", {"user": user, "suite": suite, "task": task})
        where = f"/v1/sessions/{asked['session']}"
        view: dict[str, Any] = {"state": "queued"}
        while view["state"] in {"queued", "running"}:
            view = await product.call("GET", f"{where}?wait=30")
        result = view.get("result")
        if view["state"] == "finished" and isinstance(result, dict):
            thumb = "up" if satisfied(result.get("files", {}), oracle) else "down"
            await product.call("POST", f"{where}/feedback", {"thumb": thumb})
    except (Away, KeyError):
        return  # the user gives up


class Away(HeadraceError):
    """The gateway did not answer within the time that a user waits."""


class Product:
    """A client of the gateway with the run's key. A restarted gateway has its sessions and may have another port."""

    def __init__(self, http: "aiohttp.ClientSession", run_dir: Path, stopping: asyncio.Event) -> None:
        self._http, self._file, self._stopping = http, run_dir / "gateway.json", stopping
        self._key = place(run_dir)

    async def call(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        """The reply's JSON, an empty dict without a body. Away when there is no reply for `PATIENCE_S`."""
        import aiohttp

        deadline = time.monotonic() + PATIENCE_S
        while not self._stopping.is_set() and time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, OSError, ValueError, KeyError, TimeoutError):
                url = json.loads(self._file.read_text())["url"]
                headers = {"x-api-key": self._key.read_text()}
                async with self._http.request(method, f"{url}{path}", json=body, headers=headers) as answer:
                    if answer.status < 500:
                        text = await answer.text()
                        parsed: dict[str, Any] = json.loads(text) if text else {}
                        return parsed
            await self._pause()
        raise Away

    async def opened(self) -> None:
        """Return when the gateway serves a policy; simulated users start only then."""
        while not self._stopping.is_set():
            with suppress(Away):
                await self.call("GET", "/healthz")
                return

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._stopping.wait()
