"""Simulated users: real HTTP requests to the gateway, with a day and a night.

The rate follows a raised cosine over `day_s` (nothing at night), arrivals are Poisson, and a user gives a thumb by the
only thing a user sees: whether the files that came back pass the tests the user had in mind. Seeded, so a run's users
ask for the same things again.
"""

import asyncio
import json
import math
import random
import time
from contextlib import suppress
from pathlib import Path

from headrace.config import Config
from headrace.messages.tasks import Oracle


def rate(moment_s: float, day_s: float, peak: float) -> float:
    """Requests per second at a moment of the day; zero around midnight, `peak` at noon."""
    return peak * max(0.0, -math.cos(2 * math.pi * moment_s / day_s))


def satisfied(files: dict[str, str], oracle: Oracle) -> bool:
    """Whether the answer has the solution's content in every file that the solution changes."""
    return all(files.get(path, "").encode() == content for path, content in oracle.solution.items())


async def simulate(config: Config, run_dir: Path, stopping: asyncio.Event) -> None:
    """Send requests until told to stop."""
    import aiohttp

    from headrace.tasks import open_suite

    suite = open_suite(config.tasks.heldout, config.tasks.dir)
    ids = suite.ids()
    rng = random.Random(config.run.seed)
    url = await gateway_url(run_dir, stopping)
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        await opened(http, url, stopping)
        begin = time.monotonic()
        while not stopping.is_set():
            now = rate(time.monotonic() - begin, config.production.day_s, config.production.peak_requests_per_s)
            # Thinning: candidates at the peak rate, kept with the share that the hour allows.
            pause = rng.expovariate(config.production.peak_requests_per_s)
            try:
                async with asyncio.timeout(pause):
                    await stopping.wait()
                break
            except TimeoutError:
                pass
            if rng.random() * config.production.peak_requests_per_s < now:
                task = ids[-1 - rng.randrange(min(len(ids), 100))]
                group.create_task(session(http, url, suite.name, task, f"user{rng.randrange(20)}", suite.oracle(task)))


async def session(http: object, url: str, suite: str, task: str, user: str, oracle: Oracle) -> None:
    """One user: ask, wait, look, give a thumb."""
    import aiohttp

    assert isinstance(http, aiohttp.ClientSession)
    try:
        async with http.post(f"{url}/v1/sessions", json={"user": user, "suite": suite, "task": task}) as answer:
            opened = await answer.json()
        view: dict[str, object] = {"state": "queued"}
        while view["state"] in {"queued", "running"}:
            async with http.get(f"{url}/v1/sessions/{opened['session']}", params={"wait": "30"}) as answer:
                view = await answer.json()
        result = view.get("result")
        if view["state"] == "finished" and isinstance(result, dict):
            thumb = "up" if satisfied(result.get("files", {}), oracle) else "down"
            async with http.post(f"{url}/v1/sessions/{opened['session']}/feedback", json={"thumb": thumb}) as answer:
                await answer.read()
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
        # The gateway may be restarting or gone: a user shrugs and leaves.
        return


async def opened(http: object, url: str, stopping: asyncio.Event) -> None:
    """Return when there is a policy to ask: a product without one has no users yet."""
    import aiohttp

    assert isinstance(http, aiohttp.ClientSession)
    while not stopping.is_set():
        with suppress(aiohttp.ClientError):
            async with http.get(f"{url}/healthz") as answer:
                if answer.ok:
                    return
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stopping.wait()


async def gateway_url(run_dir: Path, stopping: asyncio.Event) -> str:
    """Where the gateway listens, once it does."""
    path = run_dir / "gateway.json"
    while not stopping.is_set():
        try:
            return str(json.loads(path.read_text())["url"])
        except (OSError, ValueError, KeyError):
            try:
                async with asyncio.timeout(0.5):
                    await stopping.wait()
            except TimeoutError:
                continue
    return ""
