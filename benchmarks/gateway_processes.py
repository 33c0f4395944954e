"""Turns a second of one gateway process and of two, and the processor time of a turn in each part.

    python -m benchmarks.gateway_processes [--seconds 10]

Broker, gateways, responders in place of the engine, and the clients are processes of their own. Each gateway has 32
clients, users of their own, that ask for one turn after another. `ratio` compares the turns a second. Where cores are
few, the processor times name the bound: `possible` is the ratio with a core for each process, at most 2.
"""

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from benchmarks.conditions import Figures, arguments, at_least, finish
from benchmarks.gateway_abuse import RATE, RESPONDER, RUN, SCRIPT, cpu_s, turn_of
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Production, Run
from headrace.gateway.tenants.store import add
from headrace.parent_death import ending_with_parent

CLIENTS = 32
"""Of each gateway."""
RESPONDERS = 2
LOAD = (sys.executable, "-m", "benchmarks.gateway_processes", "--load")


async def load(url: str, key: str, seconds: float) -> int:
    """The turns that `CLIENTS` clients got within some seconds."""
    until, turns = time.monotonic() + seconds, 0

    async def one(http: aiohttp.ClientSession) -> None:
        nonlocal turns
        user = {"user": secrets.token_hex(4)}
        while time.monotonic() < until:
            async with http.post(f"{url}/v1/chat/completions", json=turn_of(secrets.token_hex(4)) | user) as answer:
                answer.raise_for_status()
                await answer.read()
            turns += 1

    async with aiohttp.ClientSession(headers={"x-api-key": key}, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http) for _ in range(CLIENTS)))
    return turns


async def started(*words: str) -> asyncio.subprocess.Process:
    """A process that ends with this one."""
    return await asyncio.create_subprocess_exec(
        *ending_with_parent([*words]), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


async def loaded(urls: list[str], key: str, seconds: float) -> list[int]:
    """Turns of each gateway, whose clients have a process of their own."""
    clients = [await started(*LOAD, url, key, str(seconds)) for url in urls]
    return [int((await each.communicate())[0]) for each in clients]


async def measure(seconds: float, folder: Path) -> Figures:
    """Run the processes: first the clients of one gateway, then the clients of both."""
    processes: list[asyncio.subprocess.Process] = []
    async with Server(folder / "broker") as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
            await declare(admin)
        async with await Bus.connect(broker.url, role="operator", credentials=broker.credentials) as operator:
            key = await add(operator, "own", requests_per_minute=RATE)
        try:
            for _ in range(RESPONDERS):
                each = await started(sys.executable, "-c", RESPONDER, RUN, broker.url, str(broker.credentials))
                assert each.stdout is not None and await each.stdout.readline() == b"ready\n"
                processes.append(each)
            urls = []
            for number in range(2):
                (there := folder / f"runs{number}" / RUN).mkdir(parents=True)
                config = Config(run=Run(dir=str(there.parent)), production=Production())
                said = msgspec.json.encode(config).decode()
                words = (said, RUN, broker.url, str(broker.credentials))
                processes.append(await started(sys.executable, "-c", SCRIPT, *words))
                async with asyncio.timeout(60):
                    while not (there / "gateway.json").exists() or "}" not in (there / "gateway.json").read_text():
                        await asyncio.sleep(0.05)
                urls.append(json.loads((there / "gateway.json").read_text())["url"])
            await loaded(urls, key, min(2.0, seconds))  # the first requests load modules
            pids = {"broker": [broker.pid], "responder": [each.pid for each in processes[:RESPONDERS]]}
            pids["gateway"] = [each.pid for each in processes[RESPONDERS:]]
            figures: Figures = {}
            for count in (1, 2):
                before = {name: sum(map(cpu_s, those)) for name, those in pids.items()}
                began = time.monotonic()
                turns = sum(await loaded(urls[:count], key, seconds))
                figures[f"turns_per_s_{count}"] = round(turns / (time.monotonic() - began), 1)
                for name, those in pids.items():
                    figures[f"{name}_cpu_ms_{count}"] = round((sum(map(cpu_s, those)) - before[name]) * 1e3 / turns, 3)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
    one = figures["gateway_cpu_ms_1"]
    least = max(figures["gateway_cpu_ms_2"] / 2, figures["responder_cpu_ms_2"] / RESPONDERS)
    return figures | {
        "ratio": round(figures["turns_per_s_2"] / figures["turns_per_s_1"], 3),
        "possible": round(min(2.0, one / least), 3),
    }


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description="turns a second of one gateway process and of two")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--load", nargs=3, metavar=("URL", "KEY", "SECONDS"), help=argparse.SUPPRESS)
    args = arguments(parser, seconds=0.5)
    if args.load:
        url, key, seconds = args.load
        print(uvloop.run(load(url, key, float(seconds))))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure(args.seconds, Path(folder)))
    finish(figures, {"ratio": at_least(figures["ratio"], 1.6)}, "aiohttp")


if __name__ == "__main__":
    main()
