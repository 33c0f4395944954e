"""Measures the live page in headless Chromium against a real broker.

    python -m benchmarks.dashboard [--seconds 30] [--rate 1000] [--steps 200]

The page loads a run with `--steps` steps of history: `first_data_ms` is the time from its navigation to the first
records. Then a publisher sends `--rate` figures a second on core NATS, as actors do. The lag of a record is the time
from its creation to the moment at which the page has it in its state; both clocks are this machine's. The page draws
what it has four times a second meanwhile. Lost is what was sent and never arrived. A publisher that is late sends what
it missed, with the time at which it sends. Needs Debian's chromium and chromium-driver.
"""

import argparse
import asyncio
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.conditions import Figures, Target, at_least, at_most, cannot_run, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config
from headrace.dashboard.live.server import STATIC, Address, LivePage
from headrace.launch.page import opened
from headrace.messages import subjects
from headrace.messages.operations import Metric
from headrace.messages.training import StepDone

RUN = "bench"
PATIENCE_S = 120.0
WATCH = """
window.lags = [];
window.numbers = new Set();
const kept = headrace.state.metrics, set = kept.set.bind(kept);
kept.set = (key, made) => {
  lags.push(performance.timeOrigin + performance.now() - 1000 * made.time);
  numbers.add(made.values.number);
  return set(key, made);
};
"""
"""Stamps every figure at the moment at which the page's own fold stores it."""


def browser() -> webdriver.Chrome:
    """Headless Chromium."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


async def fill(bus: Bus, steps: int) -> None:
    """The history that the page reads when it loads."""
    for number in range(steps):
        done = StepDone(
            run=RUN,
            step=number,
            version=number + 1,
            state_hash="0" * 32,
            manifest_seq=1,
            groups=(f"g{number:06d}",),
            staleness_bound=1,
            waited_s=0.5,
            seconds=1.0,
            pass_rate=0.5,
            staleness={"0": 90, "1": 10},
        )
        await bus.publish(subjects.STEP.at(run=RUN), done)


async def send(bus: Bus, rate: int, seconds: float) -> tuple[int, float]:
    """Publish evenly; the number of messages and the seconds that it took. It never sends a missed one in advance."""
    started, sent = time.perf_counter(), 0
    total = round(rate * seconds)
    while sent < total:
        due = min(total, int((time.perf_counter() - started) * rate) + 1)
        while sent < due:
            figure = Metric(actor="trainer", id="bench", run=RUN, time=time.time(), values={"number": float(sent)})
            await bus.emit(subjects.METRIC.at(actor="trainer", id="bench"), figure)
            sent += 1
        await asyncio.sleep(0.001)
    return sent, time.perf_counter() - started


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 2)


async def measure(args: argparse.Namespace, place: Path) -> tuple[Figures, dict[str, Target]]:
    """Broker, page and browser; the figures and their targets."""
    address = Address("127.0.0.1", 0)
    server = Server(place / "broker", need_free=0, origins=address.origins)
    await server.start()
    driver = await asyncio.to_thread(browser)
    try:
        async with (
            await Bus.connect(server.url, role="admin", credentials=server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as trainer,
            await Bus.connect(server.url, role="dashboard", credentials=server.credentials) as reader,
        ):
            await declare(admin)
            await fill(trainer, args.steps)
            seed = (server.credentials / "web.nk").read_text().strip()
            page = LivePage(
                Config(),
                RUN,
                reader,
                websocket=server.websocket,
                seed=seed,
                started=time.time(),
                originals=lambda _: {},
            )
            await page.start(address)
            await asyncio.to_thread(driver.get, opened(address.url, page.access.key))

            def wait(script: str, what: str) -> Any:
                return WebDriverWait(driver, PATIENCE_S, 0.05).until(
                    lambda one: one.execute_script(f"return {script}"), what
                )

            await asyncio.to_thread(wait, "window.firstData && headrace.state.users !== null", "the page has no data")
            first = float(driver.execute_script("return window.firstData"))
            steps = int(driver.execute_script("return headrace.state.steps.size"))
            await asyncio.to_thread(driver.execute_script, WATCH)
            sent, seconds = await send(trainer, args.rate, args.seconds)
            arrived, deadline = 0, time.monotonic() + PATIENCE_S
            while arrived < sent and time.monotonic() < deadline:
                arrived = int(await asyncio.to_thread(driver.execute_script, "return numbers.size"))
                await asyncio.sleep(0.2)
            lags = [float(lag) for lag in driver.execute_script("return lags")]
            counts = driver.execute_script("return headrace.state.counts")
            await page.close()
    finally:
        await asyncio.to_thread(driver.quit)
        await server.stop()
    bundle = sum(path.stat().st_size for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))
    figures: Figures = {
        "first_data_ms": round(first, 1),
        "steps_of_history": steps,
        "sent": sent,
        "lost": sent - arrived,
        "unreadable": counts["unreadable"] + counts["refused"],
        "messages_per_s": round(sent / seconds, 1),
        "lag_p50_ms": percentile(lags, 0.5),
        "lag_p99_ms": percentile(lags, 0.99),
        "lag_max_ms": percentile(lags, 1.0),
        "bundle_kb": round(bundle / 1000, 1),
    }
    targets = {
        "first_data_ms": at_most(figures["first_data_ms"], 1000.0),
        "messages_per_s": at_least(figures["messages_per_s"], round(0.99 * args.rate, 1)),
        "lag_p99_ms": at_most(figures["lag_p99_ms"], 50.0),
        "lost": at_most(figures["lost"] + figures["unreadable"], 0),
        "bundle_kb": at_most(figures["bundle_kb"], 300.0),
    }
    return figures, targets


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=1000, help="messages a second")
    parser.add_argument("--steps", type=int, default=200, help="steps of history")
    args = parser.parse_args()
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        cannot_run("there is no browser here: make browser (Debian's chromium and chromium-driver)")
    with tempfile.TemporaryDirectory() as text:
        figures, targets = uvloop.run(measure(args, Path(text)))
    finish(figures, targets, "nats-py", "selenium")


if __name__ == "__main__":
    main()
