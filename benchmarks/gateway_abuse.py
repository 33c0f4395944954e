"""Serves well-behaved clients while one tenant misuses the gateway; the others' latency holds, and nothing leaks.

    python -m benchmarks.gateway_abuse [--seconds 15]

The gateway runs in a process of its own behind a real broker; in a second process a responder answers turns in place of
the engine, those of the abuser after a minute, others at once. Each kind of misuse runs for `--seconds`, with one key:
1,024 slow turns at once; turns whose clients leave after 20 ms; repeats of one turn (`Idempotency-Key`); bodies of
100 MB; paths that leave their folder, user ids with dots and line ends, ids of another tenant. Meanwhile `GOOD` clients
of another tenant ask for turns and read agents, one request after another. Their latency is compared with their own
before and after; `gateway_busy` is the share of a processor that the gateway takes. All processes share the cores, so
the misuse runs at the lowest priority, as on a machine of its own. `gateway_pass_ms` is what the gateway alone adds, at
p99: the processor time that it spends in 2 ms in which a request may wait. Connections that never send a request are
the business of the proxy in front.
"""

import argparse
import asyncio
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.conditions import Figures, arguments, at_most, cannot_run, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Production, Run
from headrace.gateway.tenants.store import add
from headrace.parent_death import ending_with_parent

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
TIMED = SCRIPT.replace(
    "uvloop.run",
    "import asyncio, time\n"
    "class Timed(Gateway):\n"
    "    async def start(self):\n"
    "        await super().start()\n"
    "        self.spawn(self.passes(open(sys.argv[5], 'w', buffering=1)), 'passes')\n"
    "    async def passes(self, log):\n"
    "        while True:\n"
    "            began = time.thread_time()\n"
    "            await asyncio.sleep(0.002)\n"
    "            log.write(f'{(time.thread_time() - began) * 1e3:.3f}\\n')\n"
    "Gateway = Timed\n"
    "uvloop.run",
)
"""The same with a line every 2 ms: processor milliseconds up to the next pass of the event loop."""
RESPONDER = (
    "import asyncio, sys, uvloop\n"
    "from headrace.bus.connection import Bus\n"
    "from headrace.messages.product import ClientTurnDone, ClientUsage\n"
    "from headrace.messages.subjects import RPC, token\n"
    "async def done(turn):\n"
    "    if getattr(turn, 'messages', ()) and turn.messages[-1].text.startswith('slow'):\n"
    "        try:\n"
    "            async with asyncio.timeout(60): await cut.setdefault(turn.id, asyncio.Event()).wait()\n"
    "        except TimeoutError: pass\n"
    "    return ClientTurnDone(text='ok', usage=ClientUsage(prompt=1, sampled=1))\n"
    "cut = {}\n"
    "async def control(message, *_):\n"
    "    cut.setdefault(message.turn, asyncio.Event()).set()\n"
    "async def main(run, url, credentials):\n"
    "    bus = await Bus.connect(url, role='rollout', credentials=credentials)\n"
    "    await bus.listen(RPC.at(service='rollout', caller='gateway', method=f'control-{token(run)}'), control)\n"
    "    await bus.respond(RPC.at(service='rollout', caller='gateway', method=f'turn-{token(run)}'), done)\n"
    "    print('ready', flush=True)\n"
    "    await asyncio.Event().wait()\n"
    "uvloop.run(main(*sys.argv[1:]))"
)
MANY = 1024
"""Slow turns at once of one key."""
PATHS = (
    "/v1/agents/%2e%2e/%2e%2e/etc/passwd",
    "/v1/agents/{agent}/artifacts/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/agents/{agent}/artifacts/%2fetc%2fpasswd",
    "/v1/agents/{agent}/artifacts/....//....//etc/passwd",
    "/../../../../etc/passwd",
)
USERS = ("a.b", "*", ">", "a\nb", "a\r\nX-Evil: 1", "\x00", "../x", "ü" * 5000, "$SYS.>", " ")

MISUSE = (sys.executable, "-m", "benchmarks.gateway_abuse", "--misuse")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Gateway:
    """The gateway's process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, passes: Path) -> None:
        self.process, self.url, self._passes = process, url, passes
        self._read = 0
        self.port = int(url.rpartition(":")[2])
        self.most_mib = 0.0

    def mib(self) -> float:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        resident_mib = pages * os.sysconf("SC_PAGESIZE") / (1 << 20)
        self.most_mib = max(self.most_mib, resident_mib)
        return round(resident_mib, 1)

    def pass_ms(self) -> float:
        """The p99 of processor time in a pass since the last call; 0 without two."""
        text = self._passes.read_text()
        lines, self._read = text[self._read : text.rindex("\n")].split(), text.rindex("\n")
        return round(statistics.quantiles(map(float, lines), n=100)[98], 2) if len(lines) > 1 else 0.0

    def files(self) -> int:
        """Open files now."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def turn_of(text: str) -> dict[str, Any]:
    """The body of a turn."""
    return {"model": "latest", "messages": [{"role": "user", "content": text}]}


async def good(url: str, key: str, agent: str, until: float) -> tuple[list[float], Counter[str]]:
    """One well-behaved client: milliseconds of every request, and the answers that were not 200."""
    took: list[float] = []
    wrong: Counter[str] = Counter()
    headers = {"x-api-key": key}
    asked = (("POST", "/v1/chat/completions"), ("GET", f"/v1/agents/{agent}"))
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as http:
        while time.monotonic() < until:
            for method, path in asked:
                began = time.perf_counter()
                body = turn_of(secrets.token_hex(4)) if method == "POST" else None
                try:
                    async with http.request(method, url + path, json=body) as answer:
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
    until, before = time.monotonic() + seconds, cpu_s(gateway.process.pid)
    gateway.pass_ms()
    results = await asyncio.gather(*(good(gateway.url, key, agent, until) for _ in range(GOOD)))
    took = sorted(each for one, _ in results for each in one)
    wrong = sum((each for _, each in results), Counter[str]())
    cuts = statistics.quantiles(took, n=100)
    busy = (cpu_s(gateway.process.pid) - before) / seconds
    figures = {"requests": len(took), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
    return figures | {"gateway_busy": round(busy, 3), "gateway_pass_ms": gateway.pass_ms()}, wrong


async def ask(http: aiohttp.ClientSession, url: str, ends: Counter[str], text: str, **headers: str) -> float:
    """One turn of the abuser. Returns the seconds after which it may ask again, 0 for at once."""
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with http.post(f"{url}/v1/chat/completions", json=turn_of(text), headers=sent) as answer:
            ends[str(answer.status)] += 1
            await answer.read()
            return float(answer.headers.get("Retry-After", 0))
    except (aiohttp.ClientError, TimeoutError) as error:
        ends[type(error).__name__] += 1
        return 1.0


async def slow(url: str, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """`MANY` turns at once that take a minute; one that is refused comes again when the gateway says."""

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        while True:
            await asyncio.sleep(await ask(http, url, ends, f"slow {number} {secrets.token_hex(4)}"))

    await _many([one] * MANY, key, over)


async def leaving(url: str, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """64 clients that leave their slow turn after 20 ms and begin another, twenty times a second each at most."""

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await ask(http, url, ends, f"slow {number} {secrets.token_hex(4)}")
            ends["left"] += 1
            await asyncio.sleep(0.05)

    await _many([one] * 64, key, over)


async def repeating(url: str, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """256 clients that repeat one slow turn under one key for repetitions; each leaves and asks again each second."""

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await ask(http, url, ends, "slow repeat", Idempotency_Key="k")
            ends["left"] += 1

    await _many([one] * 256, key, over)


async def bodies(url: str, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
    """Four clients that send bodies of 100 MB."""
    await asyncio.gather(*(large(url, key, over, ends) for _ in range(4)))


async def _many(clients: list[Any], key: str, over: asyncio.Event) -> None:
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers={"x-api-key": key}, connector=unlimited) as http:
        tasks = [asyncio.create_task(one(http, number)) for number, one in enumerate(clients)]
        await over.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MISUSES = {"slow_turns": slow, "disconnects": leaving, "retries": repeating, "bodies": bodies}


async def abuse(name: str, url: str, key: str) -> None:
    """A misuse in a process of its own, until its standard input ends; prints how its requests ended."""
    over, ends = asyncio.Event(), Counter[str]()
    misuse = asyncio.create_task(MISUSES[name](url, key, over, ends))
    await asyncio.to_thread(sys.stdin.read)
    over.set()
    await misuse
    print(json.dumps(dict(sorted(ends.items()))))


async def large(url: str, key: str, over: asyncio.Event, ends: Counter[str]) -> None:
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
                async with http.post(url + "/v1/agents", data=chunks(), headers=stated) as answer:
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
        keys["abuser"] = await add(operator, "abuser", requests_per_minute=60_000)
    arguments = [msgspec.json.encode(config).decode(), RUN, broker.url, str(broker.credentials)]
    process = await asyncio.create_subprocess_exec(
        *ending_with_parent([sys.executable, "-c", TIMED, *arguments, str(folder / "passes")]),
        stderr=subprocess.DEVNULL,
    )
    address = folder / RUN / "gateway.json"
    async with asyncio.timeout(60):
        while not address.exists() or not address.read_text().endswith("}"):
            await asyncio.sleep(0.05)
    gateway = Gateway(process, json.loads(address.read_text())["url"], folder / "passes")
    async with aiohttp.ClientSession(headers={"x-api-key": keys["own"]}) as http:
        async with http.post(gateway.url + "/v1/agents", json={"prompt": "x", "user": "u"}) as answer:
            made = await answer.json()
    return gateway, keys, made["agent"]["id"]


async def run(seconds: float, folder: Path) -> Figures:
    """Measure before, during each kind of misuse, and after."""
    during: dict[str, dict[str, float]] = {}
    ends: dict[str, dict[str, int]] = {}
    missed: Counter[str] = Counter()
    async with Server(folder / "broker") as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
            await declare(admin)
        responder = await asyncio.create_subprocess_exec(
            *ending_with_parent([sys.executable, "-c", RESPONDER, RUN, broker.url, str(broker.credentials)]),
            stdout=subprocess.PIPE,
        )
        assert responder.stdout is not None and await responder.stdout.readline() == b"ready\n"
        gateway, keys, agent = await opened(folder / "runs", broker)
        try:
            await measured(gateway, keys["own"], agent, 3.0)  # the first requests load modules
            before, wrong = await measured(gateway, keys["own"], agent, seconds)
            missed += wrong
            rss_before, files_before = gateway.mib(), gateway.files()
            for name in MISUSES:
                abuser = await asyncio.create_subprocess_exec(
                    *ending_with_parent([*MISUSE, name, gateway.url, keys["abuser"]]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                await asyncio.sleep(5.0)  # the misuse has begun
                during[name], wrong = await measured(gateway, keys["own"], agent, seconds)
                missed += wrong
                gateway.mib()
                ends[name] = json.loads((await abuser.communicate(b""))[0])
                await settled(gateway, files_before + 2 * GOOD)
            statuses = await hostile(gateway, keys, agent)
            after, wrong = await measured(gateway, keys["own"], agent, seconds)
            missed += wrong
            rss_after, files_after = gateway.mib(), await settled(gateway, files_before)
        finally:
            for process in (gateway.process, responder):
                process.terminate()
                await process.wait()
    return {
        "ends": ends,
        "before": before,
        "during": during,
        "after": after,
        "p99_ratios": {name: round(one["p99_ms"] / before["p99_ms"], 3) for name, one in during.items()},
        "not_served": dict(missed),
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
    parser = argparse.ArgumentParser(description="well-behaved clients while one tenant misuses the gateway")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--misuse", nargs=3, metavar=("NAME", "URL", "KEY"), help=argparse.SUPPRESS)
    args = arguments(parser, seconds=0.5)
    need = 2 * MANY + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < need:
        cannot_run(f"{MANY} connections need {need} open files, and the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))
    if args.misuse:
        os.nice(19)
        uvloop.run(abuse(*args.misuse))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(run(args.seconds, Path(folder)))
    targets = {
        **{f"p99_{name}": at_most(ratio, 1.1) for name, ratio in figures["p99_ratios"].items()},
        "not_served": at_most(sum(figures["not_served"].values()), 0),
        "rss_most_mib": at_most(figures["rss_most_mib"], figures["rss_before_mib"] + 256),
        "files_left": at_most(figures["files_left"], 4),
        "served_wrongly": at_most(figures["served_wrongly"], 0),
        "users_with_server_error": at_most(figures["users_with_server_error"], 0),
    }
    finish(figures, targets, "aiohttp")


if __name__ == "__main__":
    main()
