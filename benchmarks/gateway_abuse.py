"""Serves well-behaved clients while ten thousand others misuse the gateway; nothing leaks, and memory is bounded.

    python -m benchmarks.gateway_abuse [--connections 10000] [--seconds 30]

The gateway runs in a process of its own behind a real broker. The misuse, all at the same time: `--connections`
connections that are silent, send half a header, or send a body at one byte a second, each opened again when the gateway
closes it; bodies of 100 MB; paths that leave their folder; user ids with dots, wildcards and line ends; ids of another
tenant. Meanwhile well-behaved clients with a key list and read agents, each over one connection and one request after
another. Their latencies are compared with those of the same clients before and after the misuse. Clients and gateway
share the machine's cores.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Production, Run
from headrace.gateway.tenants.store import add

RUN = "rabuse"
GOOD = 16
"""Well-behaved clients at once."""
RATE = 1_000_000
"""Requests a minute of a well-behaved client's key, so that no answer of theirs is a 429."""
SCRIPT = (
    "import msgspec, sys, uvloop\n"
    "from headrace.actors.gateway import Gateway\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
    "uvloop.run(run_actors([(Gateway, 'gateway-1')], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))"
)
HALVES = (
    b"",
    b"POST /v1/agents HTTP/1.1\r\nHost: localhost\r\nContent-",
    b"POST /v1/agents HTTP/1.1\r\nHost: localhost\r\nx-api-key: %b\r\nContent-Type: application/json\r\n"
    b"Content-Length: 90000\r\n\r\n{",
)
PATHS = (
    "/v1/agents/%2e%2e/%2e%2e/etc/passwd",
    "/v1/agents/{agent}/artifacts/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/agents/{agent}/artifacts/%2fetc%2fpasswd",
    "/v1/agents/{agent}/artifacts/....//....//etc/passwd",
    "/../../../../etc/passwd",
)
USERS = ("a.b", "*", ">", "a\nb", "a\r\nX-Evil: 1", "\x00", "../x", "ü" * 5000, "$SYS.>", " ")


class Gateway:
    """The gateway's process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.rpartition(":")[2])
        self.most_mib = 0.0

    def mib(self) -> float:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        resident_mib = pages * os.sysconf("SC_PAGESIZE") / (1 << 20)
        self.most_mib = max(self.most_mib, resident_mib)
        return round(resident_mib, 1)

    def files(self) -> int:
        """Open files now."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


async def good(url: str, key: str, agent: str, until: float) -> tuple[list[float], Counter[str]]:
    """One well-behaved client: milliseconds of every request, and the answers that were not 200."""
    took: list[float] = []
    wrong: Counter[str] = Counter()
    headers = {"x-api-key": key}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as http:
        while time.monotonic() < until:
            for path in (f"/v1/agents/{agent}", "/v1/agents?limit=5"):
                began = time.perf_counter()
                try:
                    async with http.get(url + path) as answer:
                        await answer.read()
                        if answer.status != 200:
                            wrong[str(answer.status)] += 1
                except (aiohttp.ClientError, TimeoutError) as error:
                    wrong[type(error).__name__] += 1
                took.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.05)
    return took, wrong


async def measured(gateway: Gateway, key: str, agent: str, seconds: float) -> tuple[dict[str, float], Counter[str]]:
    """Latencies of all well-behaved clients over some seconds."""
    until = time.monotonic() + seconds
    results = await asyncio.gather(*(good(gateway.url, key, agent, until) for _ in range(GOOD)))
    took = sorted(each for one, _ in results for each in one)
    wrong = sum((each for _, each in results), Counter[str]())
    cuts = statistics.quantiles(took, n=100)
    return {"requests": len(took), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}, wrong


async def slow(gateway: Gateway, number: int, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """One connection that never completes a request, opened again whenever it is closed."""
    source = f"127.0.{1 + number // 5000}.1"
    data = HALVES[number % 3]
    if b"%b" in data:
        data = data % key.encode()
    while not over.is_set():
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=(source, 0))
        except OSError as error:
            ends[f"connect: {type(error).__name__}"] += 1
            await asyncio.sleep(0.5)
            continue
        try:
            writer.write(data)
            while not over.is_set():
                try:
                    async with asyncio.timeout(1.0):
                        answer = await reader.read(64)
                    ends[answer[9:12].decode() or "closed"] += 1
                    break
                except TimeoutError:
                    if number % 3 == 2:
                        writer.write(b"x")
        except ConnectionError:
            ends["closed"] += 1
        finally:
            writer.transport.abort()
        await asyncio.sleep(1.0)


async def large(gateway: Gateway, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """Bodies of 100 MB, with and without a stated length."""

    async def chunks() -> Any:
        for _ in range(100):
            yield bytes(1 << 20)

    number = 0
    async with aiohttp.ClientSession(headers={"x-api-key": key, "Content-Type": "application/json"}) as http:
        while not over.is_set():
            number += 1
            stated = {"Content-Length": str(100 << 20)} if number % 2 else {}
            try:
                async with http.post(gateway.url + "/v1/agents", data=chunks(), headers=stated) as answer:
                    ends[f"100 MB: {answer.status}"] += 1
            except (aiohttp.ClientError, OSError, AssertionError) as error:
                ends[f"100 MB: {type(error).__name__}"] += 1
            await asyncio.sleep(0.5)


async def hostile(gateway: Gateway, keys: dict[str, str], agent: str) -> dict[str, list[int]]:
    """Statuses by kind of request: hostile paths, strange user ids, and requests for another tenant's agent."""
    statuses: dict[str, list[int]] = {"paths": [], "users": [], "foreign": []}
    async with aiohttp.ClientSession(headers={"x-api-key": keys["own"]}) as http:
        for path in PATHS:
            async with http.get(gateway.url + path.format(agent=agent)) as answer:
                body = await answer.read()
                assert b"root:" not in body, path
                statuses["paths"].append(answer.status)
        for user in USERS:
            async with http.post(gateway.url + "/v1/agents", json={"prompt": "x", "user": user}) as answer:
                statuses["users"].append(answer.status)
    async with aiohttp.ClientSession(headers={"x-api-key": keys["other"]}) as http:
        for method, path in (
            ("GET", f"/v1/agents/{agent}"),
            ("GET", f"/v1/agents/{agent}/usage"),
            ("GET", f"/v1/agents/{agent}/artifacts"),
            ("POST", f"/v1/agents/{agent}/archive"),
            ("POST", f"/v1/agents/{agent}/runs"),
        ):
            async with http.request(method, gateway.url + path, json={"prompt": "x"}) as answer:
                statuses["foreign"].append(answer.status)
        async with http.get(gateway.url + "/v1/agents") as answer:
            assert agent not in await answer.text(), "another tenant's agent is listed"
    return statuses


async def settled(gateway: Gateway, before: int) -> int:
    """The gateway's open files, once they are as few as before, or after a minute."""
    until = time.monotonic() + 60
    while (open_files := gateway.files()) > before and time.monotonic() < until:
        await asyncio.sleep(0.25)
    return open_files


async def opened(folder: Path, broker: Server) -> tuple[Gateway, dict[str, str], str]:
    """The gateway with the keys of three tenants, and an agent of the first."""
    config = Config(run=Run(dir=str(folder)), production=Production(training_allowed=True))
    (folder / RUN).mkdir(parents=True)
    async with await Bus.connect(broker.url, role="operator", credentials=broker.credentials) as operator:
        keys = {name: await add(operator, name, training=True, requests_per_minute=RATE) for name in ("own", "other")}
        keys["abuser"] = await add(operator, "abuser")
    arguments = [msgspec.json.encode(config).decode(), RUN, broker.url, str(broker.credentials)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, *arguments, stderr=subprocess.DEVNULL)
    address = folder / RUN / "gateway.json"
    async with asyncio.timeout(60):
        while not address.exists() or not address.read_text().endswith("}"):
            await asyncio.sleep(0.05)
    gateway = Gateway(process, json.loads(address.read_text())["url"])
    async with aiohttp.ClientSession(headers={"x-api-key": keys["own"]}) as http:
        async with http.post(gateway.url + "/v1/agents", json={"prompt": "x", "user": "u"}) as answer:
            made = await answer.json()
    return gateway, keys, made["agent"]["id"]


async def run(connections: int, seconds: float, folder: Path) -> Figures:
    """Measure before, during and after."""
    async with Server(folder / "broker") as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
            await declare(admin)
        gateway, keys, agent = await opened(folder / "runs", broker)
        try:
            before, wrong_before = await measured(gateway, keys["own"], agent, 5.0)
            rss_before, files_before = gateway.mib(), gateway.files()
            over, ends = asyncio.Event(), Counter[str]()
            abusers = [
                asyncio.create_task(slow(gateway, number, keys[("abuser", "other")[number % 2]], over, ends))
                for number in range(connections)
            ]
            abusers += [asyncio.create_task(large(gateway, keys["abuser"], over, ends)) for _ in range(4)]
            await asyncio.sleep(2.0)
            attacks = asyncio.create_task(hostile(gateway, keys, agent))
            during_task = asyncio.create_task(measured(gateway, keys["own"], agent, seconds))
            while not during_task.done():
                gateway.mib()
                await asyncio.sleep(0.2)
            (during, wrong), statuses = await during_task, await attacks
            over.set()
            await asyncio.gather(*abusers)
            after, wrong_after = await measured(gateway, keys["own"], agent, 5.0)
            rss_after, files_after = gateway.mib(), await settled(gateway, files_before)
        finally:
            gateway.process.terminate()
            await gateway.process.wait()
    return {
        "connections": connections,
        "ends": dict(sorted(ends.items())),
        "before": before,
        "during": during,
        "after": after,
        "p50_ratio": round(during["p50_ms"] / before["p50_ms"], 2),
        "not_served": dict(wrong_before + wrong + wrong_after),
        "not_served_share": round(sum(wrong.values()) / during["requests"], 5),
        "rss_before_mib": rss_before,
        "rss_most_mib": round(gateway.most_mib, 1),
        "rss_after_mib": rss_after,
        "files_left": max(0, files_after - files_before),
        "statuses": statuses,
        "served_wrongly": sum(
            status < 400 or status >= 500 for name in ("paths", "foreign") for status in statuses[name]
        ),
        "users_with_server_error": sum(status >= 500 for status in statuses["users"]),
    }


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description="well-behaved clients while others misuse the gateway")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    need = args.connections + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < need:
        cannot_run(f"{args.connections} connections need {need} open files, and the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(run(args.connections, args.seconds, Path(folder)))
    targets = {
        "connections": at_least(figures["connections"], 10_000),
        "not_served_share": at_most(figures["not_served_share"], 0.0),
        "rss_most_mib": at_most(figures["rss_most_mib"], figures["rss_before_mib"] + 256),
        "files_left": at_most(figures["files_left"], 4),
        "served_wrongly": at_most(figures["served_wrongly"], 0),
        "users_with_server_error": at_most(figures["users_with_server_error"], 0),
    }
    finish(figures, targets, "aiohttp")


if __name__ == "__main__":
    main()
