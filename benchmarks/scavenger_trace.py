"""Users' time to first token with lending and without it, over days with a night, a peak and a sudden step.

    python -m benchmarks.scavenger_trace [--pairs 2] [--day 180]
    python -m benchmarks.scavenger_trace --make                        # benchmarks/traces/diurnal.json, seed 1

A real run of a tiny Qwen3 with random weights (`headrace up`, processes as sandboxes) serves agents that bring their
own tools, by HTTP; its one rollout actor belongs to the product, so training advances only while it is lent. Days with
lending and days without it come in the order kept, lent, lent, kept, so that a slow drift hits both alike; the number
of pairs is therefore even. Each day sends the same requests at the same times; so a pair is one request on both kinds
of days. A request asks for one token, so its duration is the time to the first token. The clock is scaled: 24 hours
take `--day` seconds, and the scavenger's times shrink likewise, but not the second between two reports of a quiet
gateway. At the end another rollout actor, for training alone, finishes the attempts that were handed back, and the
run's ledger is audited.
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from benchmarks.conditions import Figures, at_least, at_most, finish
from benchmarks.tiny_run import TINY
from headrace.actors.scavenger.actor import Scavenger
from headrace.bus.broker.server import running
from headrace.bus.connection import Bus
from headrace.config import Config, Production
from headrace.gateway.tenants.keys import ApiKeys
from headrace.launch.supervision.children import actor_command
from headrace.messages import subjects
from headrace.messages.operations import Event
from headrace.messages.rollout import SlotFailed, Trajectory, TurnSampled

ROOT = Path(__file__).parents[1]
TRACE = Path(__file__).parent / "traces" / "diurnal.json"
DAY_S = 24 * 3600.0
STEP_AT, STEP_S, STEP = 3 * 3600.0, 1800.0, 10.0
"""At three in the morning the rate is ten times as high for half an hour."""
REQUESTS = 1100
"""Expected requests of a day."""
LEND_AFTER_S, LEND_AGAIN_S, FORECAST_S = 60.0, 600.0, 300.0
"""The scavenger's times in seconds of the day's clock."""
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
CHANGES: dict[str, Any] = {key: value for key, value in TINY.items() if not key.startswith("policy.")} | {
    "curriculum.steps": 100_000,
    "mid_training.tokens": 0,
    "limits.context_tokens": 4096,
    "production.simulate": False,
    "production.context_tokens": 4096,
    "dashboard.enabled": False,
    "evaluation.every": 0,
    "processes.groups": [
        ["curriculum", "evaluator", "dead_letter", "environment", "judge"],
        ["gateway", "feedback"],
        ["rollout:product"],
        ["trainer", "weight_sender", "weight_receiver"],
    ],
}


def rate(moment_s: float) -> float:
    """Requests at a moment of the day, relative to noon: a raised cosine over a quiet night, and the step."""
    usual = 0.02 + 0.98 * (0.5 - 0.5 * math.cos(2 * math.pi * moment_s / DAY_S)) ** 2
    return usual * (STEP if STEP_AT <= moment_s < STEP_AT + STEP_S else 1.0)


def make(seed: int) -> list[float]:
    """Poisson arrivals of a day, in seconds of the day's clock."""
    rng = random.Random(seed)
    minutes = [rate(60.0 * minute) for minute in range(24 * 60)]
    most = max(minutes)
    peak = REQUESTS / (sum(minutes) * 60.0)
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(peak * most)) < DAY_S:
        if rng.random() * most < rate(now):
            arrivals.append(round(now, 1))
    return arrivals


class Day(NamedTuple):
    """One day: seconds to the first token of each request, and the changes of the lease."""

    lending: bool
    seconds: list[float]
    changes: list[tuple[float, str]]
    """(second of the day's clock, lent or reclaimed)"""


class Served:
    """A running `headrace up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, str(ROOT / "examples" / "own" / "model.py"), str(folder / "model")], check=True)
        changes = CHANGES | {"policy.checkpoint": str(folder / "model")}
        words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "up", str(ROOT / "deploy" / "demo.toml")]
            + [word for each in words for word in ("--set", each)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )

    @property
    def run(self) -> Path:
        """The run's folder."""
        return (self.folder / "runs" / "latest").resolve()

    async def ready(self, http: aiohttp.ClientSession) -> str:
        """The gateway's address, once a policy is served."""
        async with asyncio.timeout(240):
            while True:
                assert self.process.poll() is None, "headrace up ended"
                try:
                    url = str(json.loads((self.run / "gateway.json").read_text())["url"])
                    async with http.get(url + "/healthz") as answer:
                        if answer.status == 200:
                            return url
                except (OSError, ValueError, aiohttp.ClientError):
                    pass
                await asyncio.sleep(0.2)

    async def connect(self, role: str) -> Bus:
        """A connection to the run's broker."""
        broker = running(self.run / "broker")
        assert broker is not None
        return await Bus.connect(broker.url, role=role, credentials=self.run / "broker" / "credentials")


async def first_token(http: aiohttp.ClientSession, url: str, number: int, failed: Counter[str]) -> float:
    """Seconds from a request to its first token; NaN for one that failed."""
    began = time.perf_counter()
    prompt = f"{number}: " + "say.sh should print alpha. " * (1 + number % 7)
    body = {"model": "latest", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "tools": TOOLS}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        text = await answer.text()
    if answer.status != 200:
        failed[f"{answer.status} {text[:200]}"] += 1
        return math.nan
    return time.perf_counter() - began


async def one_day(
    served: Served,
    http: aiohttp.ClientSession,
    url: str,
    arrivals: list[float],
    day_s: float,
    lending: bool,
    failed: Counter[str],
) -> Day:
    """Send a day's requests."""
    scale = day_s / DAY_S
    bus = await served.connect("scavenger")
    never = 0.0 if lending else 1e9
    rules = Production(
        rollouts=("product",),
        lend_after_s=never + LEND_AFTER_S * scale,
        lend_again_s=LEND_AGAIN_S * scale,
        forecast_s=FORECAST_S * scale,
    )
    config = Config(production=rules)
    scavenger = Scavenger(config, bus, served.run.name, f"scavenger-{time.monotonic_ns()}")
    await scavenger.start()
    began, changes = time.monotonic(), list[tuple[float, str]]()
    wall = time.time()
    tasks: list[asyncio.Task[float]] = []
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(began + arrival * scale - time.monotonic())
        tasks.append(asyncio.create_task(first_token(http, url, number, failed)))
    seconds = await asyncio.gather(*tasks)
    await asyncio.sleep(max(0.0, began + day_s - time.monotonic()))
    where = subjects.EVENT.where(run=served.run.name, actor="scavenger", type="event")
    operator = await served.connect("operator")
    async for received in operator.history("HR_EVENT", where):
        event = received.message
        if isinstance(event, Event) and event.id == scavenger.id and event.kind in ("lent", "reclaimed"):
            changes.append(((received.time - wall) / scale, event.kind))
    await scavenger.grant("product", ("production",), "the day is over")
    await scavenger.shut(5.0)
    for each in (bus, operator):
        await each.close()
    return Day(lending, list(seconds), [change for change in changes if change[0] > 1.0])


async def handed_back(served: Served, timeout_s: float) -> dict[str, int]:
    """Finish the training attempts in another rollout actor. Returns the number of attempts that were revoked (handed
    back at a reclaim, or still open), how many of them are open now, and the ends of the others by actor."""
    broker = running(served.run / "broker")
    assert broker is not None
    argv = actor_command(
        ("rollout:elsewhere",),
        config=served.run / "config.json",
        run=served.run.name,
        url=broker.url,
        credentials=str(served.run / "broker" / "credentials"),
    )
    bus = await served.connect("operator")
    begun, ended = await attempts(bus, served.run.name)
    revoked = await returned(bus, served.run.name) | (begun - ended.keys())
    other = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + timeout_s
        while revoked - ended.keys() and time.monotonic() < until:
            await asyncio.sleep(1.0)
            _, ended = await attempts(bus, served.run.name)
        ends = Counter(ended[each] for each in revoked if each in ended)
        left = len(revoked - ended.keys())
        return {"revoked": len(revoked), "open": left, **{f"by_{name}": count for name, count in ends.items()}}
    finally:
        other.terminate()
        await other.wait()
        await bus.close()


async def attempts(bus: Bus, run: str) -> tuple[set[str], dict[str, str]]:
    """Training attempts with at least one turn, and the ends of all: the actor that finished it, or `failed`."""
    begun, ended = set[str](), dict[str, str]()
    async for received in bus.history("HR_TURN", subjects.TURN.where(run=run, trajectory="*")):
        if isinstance(received.message, TurnSampled):
            begun.add(received.message.trajectory)
    async for received in bus.history("HR_TRAJ", subjects.TRAJ.where(run=run, group="*")):
        if isinstance(received.message, Trajectory):
            ended[received.message.id] = received.message.rollout
    async for received in bus.history("HR_LEDGER", subjects.FAIL.where(run=run, group="*")):
        if isinstance(failed := received.message, SlotFailed):
            ended[f"{failed.group}-{failed.slot}-{failed.attempt}"] = "failed"
    return begun, ended


async def returned(bus: Bus, run: str) -> set[str]:
    """Training attempts that the product's actor handed back."""
    where = subjects.EVENT.where(run=run, actor="rollout", type="event")
    events = [received.message async for received in bus.history("HR_EVENT", where)]
    return {event.text for event in events if isinstance(event, Event) and event.kind == "handed_back"}


def ratio(with_lending: list[float], without: list[float], seed: int = 1) -> tuple[float, float, float]:
    """Ratio of the 99th percentiles over pairs, and its 95 % interval by resampling pairs."""
    pairs = np.array([both for both in zip(with_lending, without, strict=True) if not math.isnan(sum(both))])
    rng = np.random.default_rng(seed)

    def of(rows: Any) -> float:
        high = np.percentile(pairs[rows], 99, axis=0)
        return float(high[0] / high[1])

    drawn = [of(rng.integers(0, len(pairs), len(pairs))) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return of(np.arange(len(pairs))), float(low), float(high)


def after_the_step(day: Day, arrivals: list[float]) -> float:
    """Seconds to the first token of the first request of the step."""
    return next(took for took, at in zip(day.seconds, arrivals, strict=True) if at >= STEP_AT)


def lendings_in_ten_minutes(day: Day) -> int:
    """The most lendings that were reclaimed within any ten minutes of the day's clock, outside the step."""
    outside = [at for at, kind in day.changes if kind == "lent" and not STEP_AT <= at < STEP_AT + STEP_S + 600]
    return max((sum(0 <= other - at < 600.0 for other in outside) for at in outside), default=0)


async def measure(pairs: int, day_s: float, folder: Path) -> Figures:
    """All days of all pairs."""
    arrivals: list[float] = json.loads(TRACE.read_text())["arrivals"]
    served = Served(folder)
    days: list[Day] = []
    failed = Counter[str]()
    try:
        key = ApiKeys(folder / "runs" / "keys.json").add("acme", requests_per_minute=1_000_000)
        headers = {"x-api-key": key}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:
            url = await served.ready(http)
            await one_day(served, http, url, arrivals, day_s / 3, True, failed)  # processes warm up
            for number in range(2 * pairs):
                lending = number % 4 in (1, 2)
                days.append(await one_day(served, http, url, arrivals, day_s, lending, failed))
        revoked = await handed_back(served, 180.0)
    finally:
        served.process.terminate()
        served.process.wait(120)
    lent, unlent = ([day for day in days if day.lending == which] for which in (True, False))
    both = [[took for day in which for took in day.seconds] for which in (lent, unlent)]
    middle, low, high = ratio(both[0], both[1])
    return {
        "requests": len(both[0]),
        "failed": dict(failed),
        "day_s": day_s,
        **{
            f"{name}_{title}_ms": round(1e3 * float(np.nanpercentile(seconds, percent)), 1)
            for name, seconds in zip(("lent", "kept"), both, strict=True)
            for title, percent in (("p50", 50), ("p99", 99))
        },
        "p99_ms_by_day": [
            [("kept", "lent")[day.lending], round(1e3 * float(np.nanpercentile(day.seconds, 99)), 1)] for day in days
        ],
        "p99_ratio": round(middle, 3),
        "p99_ratio_low": round(low, 3),
        "p99_ratio_high": round(high, 3),
        "after_step_s": [round(after_the_step(day, arrivals), 3) for day in lent],
        "lendings": [sum(kind == "lent" for _, kind in day.changes) for day in lent],
        "lendings_in_ten_minutes": max(lendings_in_ten_minutes(day) for day in lent),
        "lent_share": round(sum(lent_time(day) for day in lent) / (len(lent) * DAY_S), 3),
        "attempts": revoked,
    }


def lent_time(day: Day) -> float:
    """Seconds of the day's clock during which capacity was lent."""
    total, since = 0.0, math.nan
    for at, kind in [*day.changes, (DAY_S, "reclaimed")]:
        if kind == "lent":
            since = at
        elif not math.isnan(since):
            total, since = total + at - since, math.nan
    return total


def even(text: str) -> int:
    """A number of pairs. argparse.ArgumentTypeError unless it is even and at least 2."""
    if not text.isdecimal() or int(text) < 2 or int(text) % 2:
        raise argparse.ArgumentTypeError(
            f"expected an even number >= 2, got {text!r}: the order kept, lent, lent, kept needs pairs of pairs"
        )
    return int(text)


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description="time to first token with and without lending")
    parser.add_argument("--pairs", type=even, default=2, help="an even number of pairs of days")
    parser.add_argument("--day", type=float, default=180.0)
    parser.add_argument("--make", action="store_true", help="write the trace anew")
    args = parser.parse_args()
    if args.make:
        TRACE.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": 1, "arrivals": make(1)}), indent=0) + b"\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args.pairs, args.day, Path(folder)))
        audit = subprocess.run(
            [sys.executable, "-m", "headrace.cli", "audit", "latest"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        figures["audit"] = audit.returncode
    targets = {
        "requests": at_least(figures["requests"], 2000),
        "p99_ratio": at_most(figures["p99_ratio"], 1.05),
        "after_step_s": at_most(max(figures["after_step_s"]), 1.0),
        "attempts_open": at_most(figures["attempts"]["open"], 0),
        "lendings_in_ten_minutes": at_most(figures["lendings_in_ten_minutes"], 1),
        "audit": at_most(figures["audit"], 0),
    }
    finish(figures, targets, "aiohttp")


if __name__ == "__main__":
    main()
